"""The bytes of each pipeline stage before launch, from the sizes of a job. Light, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from mindspeed.job.arithmetic import (
    BYTES,
    Parameters,
    counts_per_chunk,
    embedding_parameters,
    layers_parameters,
    output_parameters,
    prediction_parameters,
    shape_of_world,
)
from mindspeed.job.world import UnknownValue, World
from mindspeed.memory.byte_count import Bytes
from mindspeed.memory_planner.tensors import LAYER_INPUT, Changes, JobOptions, chunk_tensors
from mindspeed.pipeline.operations import PipelineShape, Placement
from mindspeed.plugins.saved_tensors import SavedTensor, SavedTensors

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
"""Sizes of a job without which no bytes can be estimated."""
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
        """Return the bytes on the device at the peak; an array where those of the rows are."""
        peak: int = peak_bytes(self.resting, self.passes, self.behind)
        return peak

    @property
    def resting(self) -> int:
        """Bytes between steps."""
        return sum(row.bytes for row in self.rows if row.held == "kept" and row.name in RESTING)

    @property
    def passes(self) -> int:
        """Bytes of what forward and backward passes have at the peak."""
        return sum(row.bytes * row.live for row in self.rows if row.held in AT_PEAK and row.name not in RESTING)

    @property
    def behind(self) -> int:
        """Bytes of the exchange of gradients, when nothing is kept for backward any more."""
        return sum(row.bytes for row in self.rows if row.held == BEHIND)

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
OPTIMIZER: Final = ("main weights", "residuals", "states", "copies")
RESTING: Final = ("weights", "gradients", *OPTIMIZER)
GRADIENT: Final = 4
"""Bytes of a gradient: Megatron's buffers are fp32."""

Live = Sequence[Sequence[int]]
"""For each rank of a pipeline, and each of its chunks, the micro-batches in flight at the peak."""


class Passes(NamedTuple):
    """Count the passes in flight at the peak.

    Of ``dropped`` ones only what is outside of layers and their inputs exist. ``placement`` is that of the chunks on ranks.
    """

    full: Live
    dropped: Live
    placement: Placement = "loop"

    @classmethod
    def of_megatron(cls, world: World) -> Passes:
        """Return those of Megatron's own schedules."""
        return cls([live_passes(world, rank) for rank in range(world.pp)], [[0] * world.vpp] * world.pp)


def stages(
    world: World,
    options: JobOptions,
    changes: Changes = (),
    resting: Changes = (),
    passes: Passes | None = None,
) -> list[Stage]:
    """Return what the ranks of a pipeline have. Raises `UnknownValue` for sizes that are not set.

    ``changes`` are those that its features make to what layers keep, ``resting`` to what the optimizer keeps between steps.
    ``passes`` are those of Megatron's own schedules if not given.
    """
    world.need(*NEEDED)
    if set(world.pattern.layers) - ESTIMATED:
        raise UnknownValue("hybrid_layer_pattern")
    passes = passes or Passes.of_megatron(world)
    pipeline = PipelineShape(world.pp, world.vpp, 1, passes.placement)
    changes, resting = tuple(changes), tuple(resting)
    made = []
    for rank, (full, dropped) in enumerate(zip(passes.full, passes.dropped, strict=True)):
        chunks = [pipeline.stage_of(rank, chunk) for chunk in range(world.vpp)]
        rows = _activations(world, options, changes, list(zip(chunks, full, dropped, strict=True)))
        made.append(Stage(rank, (*resting_rows(world, options, resting, parameters(world, chunks)), *rows)))
    return made


def is_outside(tensor: SavedTensor) -> bool:
    """Return whether a tensor is outside of layers, or the input of one, which a pass that is dropped keeps."""
    return tensor.prediction or tensor.name.partition(":")[0] in _NOT_DROPPED


def peak_bytes(resting: Any, passes: Any, behind: Any) -> Any:
    """Return the bytes of a rank at its peak, of numbers or of arrays.

    The larger of what passes have and of what the exchange of gradients behind them needs is in addition to what rests.
    """
    return resting + passes + (behind - passes) * (behind > passes)


def passes_in_flight(pp: Any, vpp: Any, micro_batches: Any, stage: Any, group: Any = None) -> Any:
    """Count the passes through chunks that a stage has in flight at its peak, under 1F1B, of numbers or of arrays.

    ``group`` is the number of micro-batches after which a rank goes on with its next chunk, by default pp.
    """
    after, most = pp - stage - 1, micro_batches * vpp
    units = (vpp - 1) * (pp if group is None else group) + after * (1 + (vpp > 1)) + 1
    return units + (most - units) * (most < units)


def live_passes(world: World, stage: int) -> list[int]:
    """Return how many micro-batches of each model chunk of a stage are in flight at its peak, under 1F1B."""
    group, micro_batches = world.micro_batch_group or world.pp, world.num_micro_batches
    chunks = [
        chunk
        for begin in range(0, micro_batches, group)
        for chunk in range(world.vpp)
        for _ in range(begin, min(begin + group, micro_batches))
    ]
    begun = chunks[: passes_in_flight(world.pp, world.vpp, micro_batches, stage, group)]
    return [begun.count(chunk) for chunk in range(world.vpp)]


def parameters(world: World, chunks: Sequence[int]) -> tuple[int, int]:
    """Return the parameters of a rank with these chunks: those outside of experts, and those of its experts."""
    shape, counts = shape_of_world(world), counts_per_chunk(world)
    layers = sum((layers_parameters(shape, counts[chunk]) for chunk in chunks), Parameters())
    return parameters_with_ends(world, layers, 0 in chunks, len(counts) - 1 in chunks)


def parameters_with_ends(world: World, layers: Parameters, first: bool, last: bool) -> tuple[int, int]:
    """Return those of a rank with these layers, and with the ends of the model that its chunks have.

    Only a chunk that has both ends shares the weights of the embedding with the output layer.
    """
    shape, is_shared = shape_of_world(world), world.pp == 1
    total = layers.split // world.tp + layers.replicated
    if first:
        ends = embedding_parameters(shape)
        total += ends.split // world.tp + ends.replicated
    if last:
        output = output_parameters(shape) if is_shared else Parameters(shape.vocab_size * shape.hidden_size)
        total += output.split // world.tp + shape.hidden_size * (2 if shape.norm_bias else 1)
        if shape.mtp_num_layers:
            behind = prediction_parameters(shape) + (Parameters() if is_shared else embedding_parameters(shape))
            total += behind.split // world.tp + behind.replicated
            layers += Parameters(experts=behind.experts)
    return total, layers.experts // world.ep // world.tp


def resting_rows(world: World, options: JobOptions, changes: Changes, counts: tuple[int, int]) -> list[Row]:
    """Return what rests on a rank with so many parameters outside of experts and in experts, and what their exchange needs."""
    size = BYTES[world.dtype]
    count = updated = sum(counts)
    arriving: list[Row] = []
    if options.distributed_optimizer:
        ranks = world.dp * world.cp
        replicas = (ranks, -(-ranks // world.ep))
        updated = sum(own // ranks for own, ranks in zip(counts, replicas, strict=True))
        if options.on_cpu:  # where a rank adds up its part itself, beside the parts of all ranks that arrive
            largest = max(own for own, ranks in zip((*counts, 0), (*replicas, 2), strict=True) if ranks > 1)
            arriving = [Row("gradients that arrive", largest * GRADIENT, BEHIND)] if largest else []
    kept: SavedTensors = (SavedTensor("states", updated * 8, 1),)
    if size == 2:
        kept = (SavedTensor("main weights", updated * 4, 1), *kept)
    for change in changes:
        kept = change(kept)
    rows = [Row("weights", count * size), Row("gradients", count * GRADIENT)]
    return [*rows, *(Row(t.name, t.bytes, t.held, t.by) for t in kept), *arriving]


def _activations(world: World, options: JobOptions, changes: Changes, chunks: Sequence[tuple[int, int, int]]) -> list[Row]:
    """Return the rows of the tensors of each chunk, for its passes that are in flight and those that are dropped."""
    rows: dict[tuple[str, int, str, str], Row] = {}
    counts = counts_per_chunk(world)
    for chunk, full, dropped in chunks:
        first, last = chunk == 0, chunk == len(counts) - 1
        for t in chunk_tensors(world, options, changes, counts[chunk], first, last, chunk // world.pp):
            key = (t.name, t.bytes * t.layers, t.held, t.by)
            before = rows.get(key, Row(*key, live=0, chunks=0))
            if t.once:
                rows[key] = Row(*key, once=True)
            else:
                passes = full + (dropped if is_outside(t) else 0)
                rows[key] = Row(*key, live=before.live + passes, chunks=before.chunks + 1)
    return list(rows.values())
