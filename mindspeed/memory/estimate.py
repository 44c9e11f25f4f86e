"""The bytes of each pipeline stage before launch, from the sizes of a job. Light, no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from mindspeed.job.arithmetic import (
    BYTES,
    LayerCounts,
    Parameters,
    counts_per_chunk,
    embedding_parameters,
    layers_parameters,
    output_parameters,
    shape_of_world,
)
from mindspeed.job.world import UnknownValue, World
from mindspeed.memory.byte_count import Bytes
from mindspeed.memory.layer_tensors import LAYER_INPUT, RESIDUAL, JobOptions, hidden_elements, layer_tensors, norm_tensors
from mindspeed.memory.prediction import loss_tensors, parameters_behind_decoder, prediction_tensors
from mindspeed.plugins.saved_tensors import SavedTensor, SavedTensors, with_coming_back

NEEDED: Final = (
    "world_size",
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "num_experts",
    "vocab_size",
    "seq_length",
    "micro_batch_size",
    "global_batch_size",
    "normalization",
    "gated_linear_unit",
    "rotary",
    "dtype",
)
"""Sizes of a job without which no bytes can be foretold."""
ESTIMATED: Final = frozenset("*+-E")
"""Layers of a hybrid model whose bytes are counted."""


@dataclass(frozen=True, slots=True)
class Row:
    """Bytes of one kind on a rank of a stage.

    ``held`` and ``by`` are those of a saved tensor. ``live`` passes through chunks of the stage have the bytes at the peak, and
    ``chunks`` of its chunks have them for each micro-batch. ``once``: a process has them once, whatever its passes.
    """

    name: str
    bytes: int
    held: str = "kept"
    by: str = ""
    live: int = 1
    chunks: int = 1
    once: bool = False


@dataclass(frozen=True, slots=True)
class Stage:
    """Describe the ranks of a pipeline stage: what they hold, and the sum of what is on the device at the peak."""

    stage: int
    rows: tuple[Row, ...]

    @property
    def peak(self) -> int:
        """Add the larger of what passes keep and of what the exchange of gradients behind them needs to what rests."""
        resting = sum(row.bytes for row in self.rows if row.held == "kept" and row.name in RESTING)
        passes = sum(row.bytes * row.live for row in self.rows if row.held in AT_PEAK) - resting
        return resting + max(passes, sum(row.bytes for row in self.rows if row.held == BEHIND))

    @property
    def activations(self) -> int:
        """Bytes that one micro-batch keeps for backward, in all chunks of the stage."""
        return sum(row.bytes * row.chunks for row in self.rows if row.held == "kept" and row.name not in RESTING)

    @property
    def swapped(self) -> int:
        """Bytes that one micro-batch keeps on the host."""
        return sum(row.bytes * row.chunks for row in self.rows if row.held == "swapped" and row.name not in RESTING)

    @property
    def optimizer(self) -> Bytes:
        """Bytes of the optimizer between steps."""
        rows = [row for row in self.rows if row.name in OPTIMIZER]
        on_host = sum(row.bytes for row in rows if row.held == "swapped")
        return Bytes(sum(row.bytes for row in rows) - on_host, on_host)


AT_PEAK: Final = ("kept", "in backward")
BEHIND: Final = "behind backward"
"""Place of a row that exists when nothing is kept for backward any more."""
_NOT_DROPPED: Final = (LAYER_INPUT, "embedding", "final norm", "loss")
_INPUTS: Final = {
    "input norm": LAYER_INPUT,
    "pre-mlp norm": RESIDUAL,
    "final norm": "final norm: input",
    "prediction norms": "prediction norms: input",
}
OPTIMIZER: Final = ("main weights", "residuals", "states")
RESTING: Final = ("weights", "gradients", *OPTIMIZER)

Changes = Iterable[Callable[[SavedTensors], SavedTensors]]
Live = Sequence[Sequence[int]]
"""For each stage, and each of its chunks, the micro-batches in flight at the peak."""


def stages(
    world: World,
    options: JobOptions,
    changes: Changes = (),
    resting: Changes = (),
    live: Live | None = None,
    dropped: Live | None = None,
) -> list[Stage]:
    """Return the stages of a job. Raises `UnknownValue` for sizes that are not set.

    ``changes`` are those that its features make to what layers keep, ``resting`` to what the optimizer keeps between steps.
    ``live`` is that of Megatron's own schedules if not given; of ``dropped`` passes only what is outside of layers and their
    inputs exist.
    """
    world.need(*NEEDED)
    if set(world.pattern.layers) - ESTIMATED:
        raise UnknownValue("hybrid_layer_pattern")
    live = live or [live_passes(world, stage) for stage in range(world.pp)]
    dropped = dropped or [[0] * world.vpp] * world.pp
    changes, resting = tuple(changes), tuple(resting)
    made = []
    for number, (full, inputs) in enumerate(zip(live, dropped, strict=True)):
        rows = _activations(world, options, changes, number, list(zip(full, inputs, strict=True)))
        made.append(Stage(number, (*_resting(world, options, resting, number), *rows)))
    return made


def live_passes(world: World, stage: int) -> list[int]:
    """Return how many micro-batches of each model chunk of a stage are in flight at its peak, under 1F1B."""
    count = world.num_micro_batches
    if world.vpp == 1:
        return [min(count, world.pp - stage)]
    units = min(count * world.vpp, 2 * (world.pp - stage - 1) + (world.vpp - 1) * world.pp + 1)
    live = [0] * world.vpp
    for unit in range(units):
        live[unit // world.pp % world.vpp] += 1
    return live


def parameters(world: World, stage: int) -> tuple[int, int]:
    """Return the parameters of a rank of a stage: those outside of experts, and those of its experts."""
    shape = shape_of_world(world)
    first, last = stage == 0, stage == world.pp - 1
    layer = sum((layers_parameters(shape, counts) for counts in counts_per_chunk(world)[stage :: world.pp]), Parameters())
    total = layer.split // world.tp + layer.replicated
    if first:
        ends = embedding_parameters(shape)
        total += ends.split // world.tp + ends.replicated
    if last:
        output = shape.vocab_size * shape.hidden_size if world.pp > 1 else output_parameters(shape).split
        total += output // world.tp + shape.hidden_size * (2 if shape.norm_bias else 1)
        behind = parameters_behind_decoder(world)
        total += behind.split // world.tp + behind.replicated
        layer += Parameters(experts=behind.experts)
    return int(total), int(layer.experts // world.ep // world.tp)


def _resting(world: World, options: JobOptions, changes: Changes, number: int) -> list[Row]:
    size = BYTES[world.dtype]
    counts = parameters(world, number)
    count = updated = sum(counts)
    arriving: list[Row] = []
    if options.distributed_optimizer:
        replicas = (world.dp * world.cp, max(1, world.dp * world.cp // world.ep))
        updated = sum(own // ranks for own, ranks in zip(counts, replicas, strict=True))
        if options.on_cpu:  # where a rank adds up its part itself, beside the parts of all ranks that arrive
            largest = max(own for own, ranks in zip((*counts, 0), (*replicas, 2), strict=True) if ranks > 1)
            arriving = [Row("gradients that arrive", largest * 4, BEHIND)] if largest else []
    kept: SavedTensors = (SavedTensor("states", updated * 8, 1),)
    if size == 2:
        kept = (SavedTensor("main weights", updated * 4, 1), *kept)
    for change in changes:
        kept = change(kept)
    rows = [Row("weights", count * size), Row("gradients", count * 4)]
    return [*rows, *(Row(t.name, t.bytes, t.held, t.by) for t in kept), *arriving]


def _activations(world: World, options: JobOptions, changes: Changes, stage: int, live: Sequence[tuple[int, int]]) -> list[Row]:
    """The rows of each chunk's tensors, for its passes that are live and those that are dropped."""
    rows: dict[tuple[str, int, str, str], Row] = {}
    for chunk, (full, dropped) in enumerate(live):
        first, last = stage == chunk == 0, stage == world.pp - 1 and chunk == world.vpp - 1
        counts = counts_per_chunk(world)[chunk * world.pp + stage]
        for t in chunk_tensors(world, options, changes, counts, first, last):
            key = (t.name, t.bytes * t.layers, t.held, t.by)
            before = rows.get(key, Row(*key, live=0, chunks=0))
            if t.once:
                rows[key] = Row(*key, once=True)
            else:
                is_outside = t.prediction or t.name.partition(":")[0] in _NOT_DROPPED
                passes = full + (dropped if is_outside else 0)
                rows[key] = Row(*key, live=before.live + passes, chunks=before.chunks + 1)
    return list(rows.values())


def chunk_tensors(
    world: World, options: JobOptions, changes: Changes, counts: LayerCounts, first: bool = False, last: bool = False
) -> SavedTensors:
    """Return what a chunk of layers keeps with the changes of features; ``first`` and ``last`` have an end of the model."""
    tensors = (*layer_tensors(world, options, counts, ends=last), *_ends(world, options, first, last))
    if last:
        tensors = (*tensors, *prediction_tensors(world, options))
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


def _ends(world: World, options: JobOptions, first: bool, last: bool) -> SavedTensors:
    """Return what the embedding, the last norm and the loss keep."""
    size = BYTES[world.dtype]
    hidden = hidden_elements(world, options)
    made: dict[str, int] = {}
    if first and options.dropout:
        made["embedding: dropout mask"] = hidden * (size if options.on_cpu else 1)
    if last:
        made |= {"final norm: input": hidden * size, **norm_tensors("final norm", world, options, hidden)}
        made |= loss_tensors(world)
    tensors = [SavedTensor(name, bytes, 1) for name, bytes in made.items() if bytes]
    shape = shape_of_world(world)
    if world.rotary and shape.latent is None:
        width = shape.kv_channels
        tensors.append(SavedTensor("rotary frequencies", world.seq_length * width * 4, 1, once=True))
    return tuple(tensors)
