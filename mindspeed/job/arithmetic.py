"""Count parameters and floating-point operations of a GPT model from its shape: dense, GQA, MLA, MoE, MTP. Light, no torch.

A product of [m, k] and [k, n] has 2 m k n operations; additions, norms, activations, softmax and lookups have none. The
numbers are those of the model, whatever layout or kernels compute it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from mindspeed.job.config import world_of_config
from mindspeed.job.hybrid_pattern import ATTENTION, EXPERTS, MLP, RECURRENT, HybridPattern
from mindspeed.job.world import LATENT_WIDTHS, UnknownValue, World

BYTES: Final = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of one number."""


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Widths of multi-latent attention: ranks of the latent vectors, and parts of a head. ``q_rank`` 0 is a plain query."""

    q_rank: int
    kv_rank: int
    head: int
    rope: int
    value: int


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameters by how layouts cut them.

    ``split`` are cut over tensor-parallel ranks, ``replicated`` are on each of them, ``experts`` are cut over expert-parallel
    (and expert tensor-parallel) ranks.
    """

    split: int = 0
    replicated: int = 0
    experts: int = 0

    @property
    def total(self) -> int:
        return self.split + self.replicated + self.experts

    def __add__(self, other: Parameters) -> Parameters:
        experts = self.experts + other.experts
        return Parameters(self.split + other.split, self.replicated + other.replicated, experts)

    def __mul__(self, count: int) -> Parameters:
        return Parameters(self.split * count, self.replicated * count, self.experts * count)


class LayerCounts(NamedTuple):
    """Layers of attention, dense MLPs, and layers with experts."""

    attention: int
    mlp: int
    experts: int


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Everything of a model that its size follows from; names as in `mindspeed.job.world.FIELDS` where they exist.

    ``moe_layers`` is the number of layers with experts. ``linear_bias`` adds biases to linear layers, ``qkv_bias`` to the
    projection of query, key and value alone, ``norm_bias`` to norms (LayerNorm), ``qk_norm`` norms of queries and keys;
    ``learned_positions`` is the length of their table, 0 without one. ``single_layers`` are those of a hybrid model, and
    ``predicted_layers`` those of each depth of its multi-token prediction; else a layer has attention and an MLP.
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    vocab_size: int
    seq_length: int
    gated_linear_unit: bool
    tied_embeddings: bool
    num_experts: int = 0
    moe_layers: int = 0
    moe_ffn_hidden_size: int = 0
    router_topk: int = 0
    shared_expert_hidden_size: int = 0
    mtp_num_layers: int = 0
    latent: LatentAttention | None = None
    linear_bias: bool = False
    qkv_bias: bool = False
    norm_bias: bool = False
    qk_norm: bool = False
    learned_positions: int = 0
    causal: bool = True
    single_layers: LayerCounts | None = None
    predicted_layers: LayerCounts | None = None

    @property
    def counts(self) -> LayerCounts:
        """Layers of attention, dense MLPs and layers with experts of the decoder."""
        transformer = LayerCounts(self.num_layers, self.num_layers - self.moe_layers, self.moe_layers)
        return self.single_layers or transformer

    @property
    def prediction(self) -> LayerCounts:
        """Layers of one depth of multi-token prediction."""
        return self.predicted_layers or (LayerCounts(1, 0, 1) if self.moe_layers > 0 else LayerCounts(1, 1, 0))

    @property
    def pairs(self) -> int:
        """Pairs of query and key in one sequence that the mask lets attention see."""
        length = self.seq_length
        return length * (length + 1) // 2 if self.causal else length * length


def shape_of_world(world: Any) -> ModelShape:
    """Return the shape of the model of a world, or of what reads like one. Raises UnknownValue for what it lacks.

    That is also the size of layers without attention that mix tokens, Mamba's.
    """
    world.need("num_layers", "hidden_size", "num_attention_heads", "vocab_size", "seq_length", "num_experts")
    latent = _latent_of_world(world)
    experts, heads = int(world.num_experts), int(world.num_attention_heads)
    ffn = int(world.ffn_hidden_size)

    def known(name: str, otherwise: Any) -> Any:
        return getattr(world, name) if world.knows(name) else otherwise

    learned = not known("rotary", True) and latent is None
    single = predicted = None
    if world.hybrid_layer_pattern:
        single, predicted = _single_layers(world.pattern)
    return ModelShape(
        num_layers=world.num_layers,
        hidden_size=world.hidden_size,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        num_query_groups=known("num_query_groups", heads),
        kv_channels=known("kv_channels", world.hidden_size // heads),
        vocab_size=world.vocab_size,
        seq_length=world.seq_length,
        gated_linear_unit=world.gated_linear_unit,
        tied_embeddings=known("tied_embeddings", False),
        num_experts=experts,
        moe_layers=_moe_layers(world),
        moe_ffn_hidden_size=known("moe_ffn_hidden_size", ffn) if experts else 0,
        router_topk=known("router_topk", 2) if experts else 0,
        shared_expert_hidden_size=known("shared_expert_hidden_size", 0) if experts else 0,
        mtp_num_layers=known("mtp_num_layers", 0),
        latent=latent,
        linear_bias=known("linear_bias", learned and not experts),
        qkv_bias=world.qkv_bias,
        qk_norm=world.qk_norm,
        norm_bias=known("normalization", "RMSNorm") == "LayerNorm",
        learned_positions=world.seq_length if learned else 0,
        single_layers=single,
        predicted_layers=predicted,
    )


def _single_layers(pattern: HybridPattern) -> tuple[LayerCounts, LayerCounts | None]:
    """Count the layers of the decoder and of one depth of multi-token prediction."""
    if any(layer in RECURRENT for layer in pattern.text):
        raise UnknownValue("hybrid_layer_pattern")
    return _counted(pattern.layers), _counted(pattern.predictions[0]) if pattern.predictions else None


def _counted(layers: str) -> LayerCounts:
    return LayerCounts(*(sum(layer in kinds for layer in layers) for kinds in (ATTENTION, MLP, EXPERTS)))


def _moe_layers(world: Any) -> int:
    """Return the number of layers with experts: all layers where no other number is given."""
    if not world.num_experts:
        return 0
    return int(world.moe_layers if world.knows("moe_layers") else world.num_layers)


def counts_per_chunk(world: World) -> tuple[LayerCounts, ...]:
    """Count the layers of each model chunk, in the order of the model.

    A transformer that mixes dense and MoE layers begins with the dense ones, as DeepSeek's models do.
    """
    if world.is_hybrid:
        return tuple(map(_counted, world.pattern_per_chunk))
    made, dense = [], world.num_layers - _moe_layers(world)
    for size in world.layers_per_chunk:
        mlp = min(size, dense)
        made.append(LayerCounts(size, mlp, size - mlp))
        dense -= mlp
    return tuple(made)


def _latent_of_world(world: Any) -> LatentAttention | None:
    """The widths of multi-latent attention, None where keys and values are made from hidden states."""
    if not (world.knows("multi_latent_attention") and world.multi_latent_attention):
        return None
    world.need(*LATENT_WIDTHS)
    q_rank = world.q_lora_rank if world.knows("q_lora_rank") else 0
    return LatentAttention(q_rank, *(getattr(world, name) for name in LATENT_WIDTHS))


def shape_of_config(
    config: Any,
    vocab_size: int,
    seq_length: int,
    tied: bool = False,
    learned_positions: int = 0,
    causal: bool = True,
    pattern: str = "",
) -> ModelShape:
    """Return the shape of a model that is built with Megatron's ``config``, a TransformerConfig; ``pattern`` is a hybrid's."""
    built = {"vocab_size": vocab_size, "seq_length": seq_length, "tied_embeddings": tied, "rotary": not learned_positions}
    shape = shape_of_world(World(world_of_config(config) | built | {"hybrid_layer_pattern": pattern}))
    return replace(shape, learned_positions=learned_positions, causal=causal)


# floating-point operations


def attention_forward(shape: ModelShape) -> int:
    """Operations of one attention layer over one sequence: projections, and scores times values of the visible pairs."""
    return 2 * shape.seq_length * _attention_weights(shape) + score_forward(shape)


def score_forward(shape: ModelShape) -> int:
    """Operations between the projections of one attention layer over one sequence: ``Q K^T`` and ``P V``."""
    latent = shape.latent
    widths = latent.head + latent.rope + latent.value if latent else 2 * shape.kv_channels
    return 2 * shape.num_attention_heads * widths * shape.pairs


def mlp_forward(shape: ModelShape) -> int:
    """Operations of one dense MLP over one sequence."""
    return 2 * shape.seq_length * _mlp_weights(shape, shape.ffn_hidden_size)


def moe_forward(shape: ModelShape) -> int:
    """Operations of one MoE layer over one sequence: router, the experts of each token, and the shared expert."""
    experts = shape.router_topk * _mlp_weights(shape, shape.moe_ffn_hidden_size)
    shared = _mlp_weights(shape, shape.shared_expert_hidden_size)
    return 2 * shape.seq_length * (shape.hidden_size * shape.num_experts + experts + shared)


def logits_forward(shape: ModelShape) -> int:
    """Operations of the output layer over one sequence."""
    return 2 * shape.seq_length * shape.hidden_size * shape.vocab_size


def forward_flops(shape: ModelShape) -> int:
    """Operations of the forward pass of the whole model over one sequence."""
    join = 2 * shape.seq_length * 2 * shape.hidden_size * shape.hidden_size
    predicted = join + layers_forward(shape, shape.prediction) + logits_forward(shape)
    return layers_forward(shape, shape.counts) + logits_forward(shape) + shape.mtp_num_layers * predicted


def mean_layer_forward(shape: ModelShape) -> float:
    """Operations of a layer of the decoder over one sequence: the mean where layers differ."""
    return layers_forward(shape, shape.counts) / shape.num_layers


def layers_forward(shape: ModelShape, counts: LayerCounts) -> int:
    """Operations of so many layers over one sequence; counts may be arrays, as those of `layers_of_rank`."""
    layers = counts.attention * attention_forward(shape) + counts.mlp * mlp_forward(shape)
    return layers + (counts.experts * moe_forward(shape) if shape.num_experts else 0)


def widths_of_products(shape: ModelShape, counts: LayerCounts, tp: Any) -> Any:
    """Columns that the products of so many layers and of the output layer read and write for each token on a rank."""
    hidden, gates = shape.hidden_size, 2 + shape.gated_linear_unit
    heads = shape.num_attention_heads
    if shape.latent is None:
        inner = shape.kv_channels * 2 * (heads + shape.num_query_groups)
    else:
        inner = heads * (2 * shape.latent.head + shape.latent.rope + 2 * shape.latent.value)
    attention = 2 * hidden + inner / tp
    mlp = 2 * hidden + gates * shape.ffn_hidden_size / tp
    experts = shape.router_topk * (2 * hidden + gates * shape.moe_ffn_hidden_size / tp)
    shared = (2 * hidden + gates * shape.shared_expert_hidden_size / tp) * (shape.shared_expert_hidden_size > 0)
    layers = counts.attention * attention + counts.mlp * mlp + counts.experts * (experts + shared)
    return layers + hidden + shape.vocab_size / tp


def model_flops(shape: ModelShape, samples: int) -> int:
    """Operations of a training step over ``samples`` sequences: a product has two more of its size in the backward pass."""
    return 3 * samples * forward_flops(shape)


# memory


def rank_parameters(world: Any) -> tuple[Any, Any]:
    """Return the parameters of the rank that has most, apart from experts, and its experts; fields may be arrays."""
    shape = shape_of_world(world)
    layer = layers_parameters(shape, layers_of_rank(world, shape))
    ends = embedding_parameters(shape)
    last = output_parameters(shape)
    own = layer.split / world.tp + layer.replicated + ends.split / world.tp + ends.replicated
    return own + last.split / world.tp * (world.pp == 1), layer.experts / world.ep / world.tp


def layers_of_rank(world: Any, shape: ModelShape) -> LayerCounts:
    """Count the layers of the pipeline stage that has most of those with experts; fields of ``world`` may be arrays."""
    if shape.single_layers is not None:
        return LayerCounts(*(count / world.pp for count in shape.single_layers))
    return with_most_experts(shape, shape.num_layers / world.pp)


def with_most_experts(shape: ModelShape, layers: Any) -> LayerCounts:
    """Count so many layers of a transformer, with experts in as many as possible; ``layers`` may be an array."""
    sparse = layers + (shape.moe_layers - layers) * (shape.moe_layers < layers)
    return LayerCounts(layers, layers - sparse, sparse)


# parameters


def embedding_parameters(shape: ModelShape) -> Parameters:
    """Parameters of the word embedding and the table of positions."""
    return Parameters(shape.vocab_size * shape.hidden_size, shape.learned_positions * shape.hidden_size)


def output_parameters(shape: ModelShape) -> Parameters:
    """Parameters of the output layer, none where it shares the embedding."""
    return Parameters(0 if shape.tied_embeddings else shape.vocab_size * shape.hidden_size)


def layers_parameters(shape: ModelShape, counts: LayerCounts) -> Parameters:
    """Parameters of layers of attention, MLPs and experts, each with its norm."""
    norms = Parameters(replicated=sum(counts) * _norm(shape, shape.hidden_size))
    dense = _attention_parameters(shape) * counts.attention + _mlp_parameters(shape) * counts.mlp
    return norms + dense + (_moe_parameters(shape) * counts.experts if shape.num_experts else Parameters())


def parameters(shape: ModelShape) -> Parameters:
    """Parameters of the whole model."""
    norm = Parameters(replicated=_norm(shape, shape.hidden_size))
    ends = embedding_parameters(shape) + output_parameters(shape) + norm
    return layers_parameters(shape, shape.counts) + ends + prediction_parameters(shape)


def prediction_parameters(shape: ModelShape) -> Parameters:
    """Parameters of multi-token prediction: each depth has a product of two hidden states, three norms, and its layers."""
    hidden, norm = shape.hidden_size, _norm(shape, shape.hidden_size)
    depth = Parameters(2 * hidden * hidden, 3 * norm) + layers_parameters(shape, shape.prediction)
    return depth * shape.mtp_num_layers


def _norm(shape: ModelShape, width: int) -> int:
    return width * (2 if shape.norm_bias else 1)


def _attention_weights(shape: ModelShape) -> int:
    """Weights of the projections of an attention layer, without biases."""
    hidden, heads, latent = shape.hidden_size, shape.num_attention_heads, shape.latent
    if latent is None:
        return hidden * shape.kv_channels * 2 * (heads + shape.num_query_groups)
    query = heads * (latent.head + latent.rope)
    down = latent.q_rank * (hidden + query) if latent.q_rank else hidden * query
    keys = hidden * (latent.kv_rank + latent.rope) + latent.kv_rank * heads * (latent.head + latent.value)
    return down + keys + heads * latent.value * hidden


def _attention_parameters(shape: ModelShape) -> Parameters:
    latent, width, normed = shape.latent, 0, (shape.kv_channels, shape.kv_channels)
    if latent is not None:
        normed = (latent.kv_rank, latent.q_rank)
    elif shape.linear_bias or shape.qkv_bias:
        width = shape.kv_channels * (shape.num_attention_heads + 2 * shape.num_query_groups)
    norms = sum(_norm(shape, channels) for channels in normed) if shape.qk_norm else 0
    return Parameters(_attention_weights(shape) + width, norms + (shape.hidden_size if shape.linear_bias else 0))


def _mlp_weights(shape: ModelShape, ffn: int) -> int:
    return shape.hidden_size * ffn * (3 if shape.gated_linear_unit else 2)


def _mlp_parameters(shape: ModelShape) -> Parameters:
    bias = shape.ffn_hidden_size * (2 if shape.gated_linear_unit else 1) if shape.linear_bias else 0
    return Parameters(_mlp_weights(shape, shape.ffn_hidden_size) + bias, shape.hidden_size if shape.linear_bias else 0)


def _moe_parameters(shape: ModelShape) -> Parameters:
    experts = shape.num_experts * _mlp_weights(shape, shape.moe_ffn_hidden_size)
    shared = _mlp_weights(shape, shape.shared_expert_hidden_size)
    return Parameters(shared, shape.hidden_size * shape.num_experts, experts)
