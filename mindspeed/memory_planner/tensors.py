"""The tensors that a model chunk keeps for backward, by their sizes. Light, no torch.

Each depth of multi-token prediction, behind the decoder on the last stage, joins the hidden states of the depth before with the
embeddings of the next tokens. It has layers, a norm and a loss.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final

from mindspeed.job.arithmetic import BYTES, LatentAttention, LayerCounts, ModelShape, shape_of_world
from mindspeed.job.world import World
from mindspeed.plugins.saved_tensors import SavedTensor, SavedTensors, with_coming_back

LAYER_INPUT: Final = "layer input"
RESIDUAL: Final = "attention: residual"
_INPUTS: Final = {
    "input norm": LAYER_INPUT,
    "pre-mlp norm": RESIDUAL,
    "final norm": "final norm: input",
    "prediction norms": "prediction norms: input",
}

Changes = Iterable[Callable[[SavedTensors], SavedTensors]]
"""The changes that features make to what layers or the optimizer keep."""


@dataclass(frozen=True, slots=True)
class JobOptions:
    """The options of a job in addition to its sizes: arguments of Megatron, whether dropout is on, and the platform."""

    on_cpu: bool = False
    sequence_parallel: bool = False
    distributed_optimizer: bool = False
    dropout: bool = False


def chunk_tensors(
    world: World,
    options: JobOptions,
    changes: Changes,
    counts: LayerCounts,
    first: bool = False,
    last: bool = False,
    chunk: int = 0,
) -> SavedTensors:
    """Return what a chunk of layers keeps with the changes of features; ``first`` and ``last`` have an end of the model."""
    tensors = (*_layer_tensors(world, options, counts, ends=last), *_ends(world, options, first, last))
    if last:
        tensors = (*tensors, *_prediction_tensors(world, options))
    tensors = tuple(replace(tensor, chunk=chunk) for tensor in tensors)
    for change in changes:
        tensors = change(tensors)
    return tuple(t for t in with_coming_back(_without_converted_inputs(tensors, world)) if t.bytes)


def _without_converted_inputs(tensors: SavedTensors, world: World) -> SavedTensors:
    """Leave out the input of a norm that keeps an fp32 copy instead, as an RMSNorm of several operators does in bf16."""
    if world.normalization != "RMSNorm" or world.dtype == "fp32":
        return tensors
    converted: Counter[tuple[str, bool]] = Counter()
    for t in tensors:
        norm, _, what = t.name.partition(": ")
        if what == "copies" and t.held == "kept" and norm in _INPUTS:
            given = LAYER_INPUT if world.is_hybrid and _INPUTS[norm] == RESIDUAL else _INPUTS[norm]
            converted[given, t.prediction] += t.layers
    kept = (replace(t, layers=t.layers - converted[t.name, t.prediction]) if t.held == "kept" else t for t in tensors)
    return tuple(t for t in kept if t.layers > 0)


def _layer_tensors(
    world: World, options: JobOptions, counts: LayerCounts, ends: bool = False, prediction: bool = False
) -> SavedTensors:
    """Return what a chunk with these local layers keeps, for one micro-batch on one rank.

    With ``ends`` the last of them is the one before the loss; with ``prediction`` they are those of multi-token prediction. A
    layer of a hybrid model has an input and one part; else a layer has attention, whose sum with the input is the second
    residual, and an MLP or experts.
    """
    shape = shape_of_world(world)
    size = BYTES[world.dtype]
    mask = size if options.on_cpu else 1  # the CPU has no fused dropout
    tokens = world.seq_length * world.micro_batch_size // world.cp
    hidden = _hidden_elements(world, options)
    scores = world.num_attention_heads // world.tp * world.seq_length * tokens
    dropped = hidden * mask if options.dropout else 0
    after = counts.mlp + counts.experts
    inputs = counts.attention + (after if world.is_hybrid else 0)
    parts = (
        ({LAYER_INPUT: hidden * size}, inputs),
        ({RESIDUAL: hidden * size}, 0 if world.is_hybrid else after),
        (_norm_tensors("input norm", world, options, hidden), counts.attention),
        (_norm_tensors("pre-mlp norm", world, options, hidden), after),
        (_attention(world, options, shape, tokens, scores) | {"attention: dropout mask": dropped}, counts.attention),
        ({"mlp: dropout mask": dropped}, after),
        (_mlp(world, tokens), counts.mlp),
        (_experts(world, shape, tokens), counts.experts),
    )
    made = ((name, bytes, layers) for tensors, layers in parts for name, bytes in tensors.items())
    kept = tuple(
        SavedTensor(name, bytes, layers, ends=ends, prediction=prediction) for name, bytes, layers in made if bytes and layers
    )
    once = {"attention: score buffer": scores * size} if counts.attention and not world.indexer_topk else {}
    if shape.latent is not None:  # each layer makes its own
        once["rotary frequencies"] = counts.attention * world.seq_length * shape.latent.rope * 4
    gradients = SavedTensor(
        "gradients of a layer", _gradients(world, options, shape, counts, tokens, hidden), 1, "in backward", once=True
    )
    return (*kept, *(SavedTensor(name, bytes, 1, once=True) for name, bytes in once.items()), gradients)


def _hidden_elements(world: World, options: JobOptions) -> int:
    """Count the elements of the hidden states of one micro-batch on one rank."""
    tokens = world.seq_length * world.micro_batch_size // world.cp
    return tokens // (world.tp if options.sequence_parallel else 1) * world.hidden_size


def _norm_tensors(name: str, world: World, options: JobOptions, hidden: int) -> dict[str, int]:
    """A norm of torch: what it is computed from, where it is made of several operators, and its output."""
    size, tokens = BYTES[world.dtype], hidden // world.hidden_size
    if world.normalization == "RMSNorm":
        copies = 4 * hidden if size == 4 else 8 * hidden
        return {f"{name}: statistics": 4 * tokens, f"{name}: copies": copies, f"{name}: output": hidden * size}
    return {f"{name}: statistics": 2 * tokens * (size if options.on_cpu else 4), f"{name}: output": hidden * size}


def _attention(world: World, options: JobOptions, shape: ModelShape, tokens: int, scores: int) -> dict[str, int]:
    size = BYTES[world.dtype]
    if (latent := shape.latent) is not None and world.indexer_topk:
        return _sparse_attention(world, options, shape, latent, tokens)
    if latent is not None:
        heads = shape.num_attention_heads // world.tp
        attended = heads * (2 * (latent.head + latent.rope) + latent.value)
        keys_and_values = tokens * (latent.kv_rank + latent.rope)
        if options.sequence_parallel:  # a copy of the own rows, while those of queries are a view of all
            keys_and_values = tokens // world.tp * latent.kv_rank + tokens * latent.rope * (world.tp == 1)
        made = {
            "attention: latent vectors": (tokens * latent.q_rank + keys_and_values) * size,
            "attention: queries, keys, values": tokens * attended * size,
            "attention: rotary tables": 4 * world.seq_length // world.cp * latent.rope * size,
        }
        return made | _scores(world, options, scores) | {"attention: output": tokens * heads * latent.value * size}
    queries = shape.num_attention_heads * shape.kv_channels // world.tp
    keys = shape.num_query_groups * shape.kv_channels // world.tp
    grouped = shape.num_query_groups < shape.num_attention_heads
    attended = queries + 2 * (queries if grouped else keys)
    if world.rotary and not grouped:
        attended += queries + keys  # rotated copies; the values keep the product of the linear layer
    tables = 4 * world.seq_length // world.cp * shape.kv_channels * size if world.rotary else 0
    return {
        "attention: queries, keys, values": tokens * attended * size,
        "attention: rotary tables": tables,
        **_scores(world, options, scores),
        "attention: output": tokens * queries * size,
    }


def _sparse_attention(
    world: World, options: JobOptions, shape: ModelShape, latent: LatentAttention, tokens: int
) -> dict[str, int]:
    """Return what Megatron's sparse attention (DSA) and its indexer keep: scores and their factors are in fp32."""
    size, keys = BYTES[world.dtype], world.seq_length
    heads, indexer = shape.num_attention_heads // world.tp, world.indexer_heads * world.indexer_head_dim
    rows = tokens // (world.tp if options.sequence_parallel else 1)
    shared = options.sequence_parallel and world.tp > 1
    gathered = latent.rope + world.hidden_size + latent.q_rank if shared else 0
    return {
        "attention: latent vectors": rows * (latent.q_rank + latent.kv_rank + latent.rope) * size,
        "attention: rotary tables": 4 * keys * latent.rope * size,
        "sparse attention: queries, keys, values": tokens * heads * (8 * (latent.head + latent.rope) + latent.value * size),
        "sparse attention: softmax": tokens * heads * keys * (4 + (size if size == 2 else 0)),
        "attention: output": tokens * heads * latent.value * size,
        "indexer: inputs": tokens * gathered * size,
        "indexer: rotary tables": 4 * keys * latent.rope * size,
        "indexer: norm": tokens * (world.indexer_head_dim * size + 2 * (size if options.on_cpu else 4)),
        "indexer: queries and keys": 4 * tokens * (indexer + world.indexer_head_dim),
        "indexer: scores": tokens * world.indexer_heads * (4 * keys + size),
        "indexer: loss": 12 * tokens * keys,
    }


def _scores(world: World, options: JobOptions, scores: int) -> dict[str, int]:
    size = BYTES[world.dtype]
    mask = softmax = size
    if not options.on_cpu:
        mask = 1
    elif size == 2:
        softmax = 4 if options.dropout else 4 + size  # torch's softmax is computed in fp32, then converted
    return {
        "attention: softmax": scores * softmax,
        "attention: softmax dropout": scores * (mask + size) if options.dropout else 0,
    }


def _mlp(world: World, tokens: int) -> dict[str, int]:
    """A dense MLP."""
    inner = tokens * (world.ffn_hidden_size // world.tp) * BYTES[world.dtype]
    return _activation("mlp", inner, bool(world.gated_linear_unit))


def _experts(world: World, shape: ModelShape, tokens: int) -> dict[str, int]:
    """The experts of each token with what brings the tokens to them."""
    size, gated = BYTES[world.dtype], bool(world.gated_linear_unit)
    routed, experts = tokens * shape.router_topk, tokens * shape.num_experts
    shared = tokens * (shape.shared_expert_hidden_size // world.tp) * size
    made = _activation("experts", routed * (shape.moe_ffn_hidden_size // world.tp) * size, gated, outputs=2)
    made |= _activation("shared experts", shared, gated)
    made["moe: dispatched tokens"] = routed * world.hidden_size * size
    made["moe: routing"] = routed * (20 + size) + experts * (6 + size)
    return made


def _gradients(world: World, options: JobOptions, shape: ModelShape, counts: LayerCounts, tokens: int, hidden: int) -> int:
    """Return the bytes of gradients when backward is in the MLP of its first layer, where everything else is still kept.

    These are the gradient of the layer's output and that of the activation's output, next to the product of the former with
    the dropout mask. A gated activation has gradients of its two inputs instead, when that product and the output are freed.
    """
    size = BYTES[world.dtype]
    widths = (
        world.ffn_hidden_size * (counts.mlp > 0),
        shape.router_topk * shape.moe_ffn_hidden_size * (counts.experts > 0),
    )
    inner = tokens * (max(widths) // world.tp) * size
    masked = hidden * size if options.dropout else 0
    return hidden * size + (2 * inner if world.gated_linear_unit else inner + masked)


def _activation(owner: str, inner: int, gated: bool, outputs: int = 1) -> dict[str, int]:
    """An activation function. Experts keep its output and, as a second one, its product with the probability."""
    return {
        f"{owner}: activation input": inner * (2 if gated else 1),
        f"{owner}: activation inner": 2 * inner if gated else 0,
        f"{owner}: activation output": outputs * inner,
    }


def _ends(world: World, options: JobOptions, first: bool, last: bool) -> SavedTensors:
    """Return what the embedding, the last norm and the loss keep."""
    size = BYTES[world.dtype]
    hidden = _hidden_elements(world, options)
    made: dict[str, int] = {}
    if first and options.dropout:
        made["embedding: dropout mask"] = hidden * (size if options.on_cpu else 1)
    if last:
        made |= {"final norm: input": hidden * size, **_norm_tensors("final norm", world, options, hidden)}
        made |= _loss_tensors(world)
    tensors = [SavedTensor(name, bytes, 1) for name, bytes in made.items() if bytes]
    shape = shape_of_world(world)
    if world.rotary and shape.latent is None:
        width = shape.kv_channels
        tensors.append(SavedTensor("rotary frequencies", world.seq_length * width * 4, 1, once=True))
    return tuple(tensors)


def _prediction_tensors(world: World, options: JobOptions) -> SavedTensors:
    """Return what all depths of a job keep for one micro-batch."""
    shape = shape_of_world(world)
    depths = shape.mtp_num_layers
    if not depths:
        return ()
    hidden, size = _hidden_elements(world, options), BYTES[world.dtype]
    tokens = world.seq_length * world.micro_batch_size // world.cp
    has_rotary = world.rotary or shape.latent is not None
    norms = _norm_tensors("prediction norms", world, options, hidden)
    norms.pop("prediction norms: output")  # joined instead
    made = {
        "prediction: embedding dropout mask": hidden * (size if options.on_cpu else 1) * options.dropout,
        "prediction norms: input": 2 * hidden * size,
        **{name: 2 * bytes for name, bytes in norms.items()},
        "prediction: joined": 2 * hidden * size,
        "prediction: gathered": hidden * size * (world.tp - 1) * options.sequence_parallel,  # the own rows are a view
        "final norm: input": hidden * size,
        **_norm_tensors("final norm", world, options, hidden),
        **_loss_tensors(world),
        "prediction: next tokens": (16 if has_rotary else 24)
        * tokens,  # with their labels, and the positions that are looked up
    }
    layers = _layer_tensors(world, options, shape.prediction, prediction=True)
    each = (replace(t, layers=t.layers * depths) for t in layers if not t.once)
    ends = (SavedTensor(name, bytes, depths, prediction=True) for name, bytes in made.items() if bytes)
    return (*each, *ends)


def _loss_tensors(world: World) -> dict[str, int]:
    """Return what one loss of each token keeps."""
    tokens = world.seq_length * world.micro_batch_size // world.cp
    # index, mask and loss of each token; with the vocabulary in parts its index in the own one and whether it is there
    targets = tokens * (13 + 9 * (world.tp > 1))
    return {"loss: logits": tokens * world.vocab_size // world.tp * 4, "loss: targets": targets}
