"""Bytes of the fullest rank in each of many layouts: the formulas of `stages`, evaluated with arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mindspeed.job.arithmetic import LayerCounts, layers_parameters, shape_of_world, with_most_experts
from mindspeed.job.world import UnknownValue, World
from mindspeed.memory_planner.plans import Active, changes, has_schedule, passes_with
from mindspeed.memory_planner.several import Column, by_case, several
from mindspeed.memory_planner.stages import (
    AT_PEAK,
    Passes,
    Stage,
    is_outside,
    parameters_with_ends,
    passes_in_flight,
    peak_bytes,
    resting_rows,
)
from mindspeed.memory_planner.tensors import JobOptions, chunk_tensors
from mindspeed.pipeline.feature import ScheduleFeature
from mindspeed.pipeline.operations import PipelineShape
from mindspeed.plugins.answers import implements
from mindspeed.plugins.discovery import Catalog
from mindspeed.plugins.feature import Feature
from mindspeed.plugins.saved_tensors import SavedTensors

Numbers = NDArray[np.float64]
Mask = NDArray[np.bool_]
Settings = Mapping[str, Mapping[str, Any]]
SIZES: Final = ("tp", "cp", "micro_batch_size", "ep", "pp", "vpp")
"""Sizes of a layout, in the order in which a formula that cannot compute with arrays gets one value of each."""
_SEQUENCE: Final = "sequence_parallel"
_OPTIMIZER: Final = "use_distributed_optimizer"
Formula = Callable[[World, Active], tuple[Any, ...]]


class _Jobs(World):
    """The jobs of several layouts as if they were one."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)

    @property
    def dp(self) -> Any:
        return self.world_size // (self.tp * self.pp * self.cp)

    @property
    def num_micro_batches(self) -> Any:
        return self.global_batch_size // (self.micro_batch_size * self.dp)


class StagePasses(NamedTuple):
    """The passes through chunks whose activations a rank has at its peak, and those that are dropped.

    ``full`` and ``dropped`` are those of each ``rank`` of a layout's pipeline, ``full_last`` and ``dropped_last`` those of the
    chunk before the loss, which the rank ``of_loss`` has. A layout with fewer ranks repeats its last.
    """

    rank: Column
    of_loss: Column
    full: Column
    dropped: Column
    full_last: Column
    dropped_last: Column


class LayoutPeaks:
    """The planner of memory for the layouts in ``columns``, called once for each set of features that it counts.

    Chunks have equal shares of the layers, rounded up, with experts in as many layers as one chunk can have.
    """

    def __init__(self, catalog: Catalog, model: Mapping[str, Any], columns: Mapping[str, Column]) -> None:
        self.catalog, self.model, self.columns = catalog, model, columns
        self._tables: dict[tuple[Any, ...], Numbers] = {}
        self._peaks: dict[tuple[Any, ...], Numbers] = {}
        self._passes: dict[tuple[Any, ...], Passes] = {}

    def of(self, rows: Column, active: Mapping[str, Mask], settings: Settings) -> Numbers:
        """Return the bytes of the fullest rank of these layouts, with the features that are active in each of them."""
        kept = self._table(_kept, _changes_passes, rows, active, settings)
        resting = self._table(_resting, _changes_resting, rows, active, settings)
        key = (id(kept), id(resting), *self._counted(has_schedule, rows, active, settings))
        if key not in self._peaks:
            self._peaks[key] = self._highest(kept, resting, rows, self._in_flight(rows, active, settings))
        return self._peaks[key]

    def _highest(self, kept: Numbers, rests: Numbers, rows: Column, flight: StagePasses) -> Numbers:
        """Return the bytes of the fullest stage of these layouts."""
        chunk, outside, once, last, last_outside, last_once = kept
        resting, behind = rests[:4, :, None], rests[4:, :, None]
        is_first, is_last = flight.rank == 0, flight.rank == flight.of_loss[:, None]
        passes = flight.full * chunk[:, None] + flight.dropped * outside[:, None] + once[:, None]
        ends = flight.full_last * (last - chunk) + flight.dropped_last * (last_outside - outside) + last_once - once
        place = is_first + 2 * is_last
        peaks = peak_bytes(np.choose(place, resting), passes + is_last * ends[:, None], np.choose(place, behind))
        highest: Numbers = peaks.max(axis=1)
        return highest

    def _in_flight(self, rows: Column, active: Mapping[str, Mask], settings: Settings) -> StagePasses:
        """Count what is in flight under the schedules of features, or Megatron's own, where the first stage has most."""
        sizes = np.stack([self.columns[name][rows] for name in ("pp", "vpp", "num_micro_batches")], axis=1)
        pp, vpp, micro_batches = sizes.T[:, :, None]
        scheduled = {name: mask[rows] for name, mask in active.items() if has_schedule(self.catalog.feature(name))}
        if not any(mask.any() for mask in scheduled.values()):
            rank = np.concatenate([np.zeros_like(pp), pp - 1], axis=1)
            full = passes_in_flight(pp, vpp, micro_batches, rank)
            return StagePasses(rank, rank[:, -1], full, np.zeros_like(full), np.ones_like(rows), np.zeros_like(rows))
        rank = np.minimum(np.arange(pp.max()), pp - 1)
        found = StagePasses(rank, *(np.zeros_like(array) for array in (rows, rank, rank, rows, rows)))
        cases, numbers = np.unique(np.column_stack([sizes, *scheduled.values()]), axis=0, return_inverse=True)
        for number, case in enumerate(cases):
            same = numbers == number
            names = [name for name, is_active in zip(scheduled, case[sizes.shape[1] :], strict=True) if is_active]
            full, dropped, placement = self._passes_of(int(rows[same.argmax()]), names, settings)
            places = rank[same.argmax()]
            found.full[same] = np.array([sum(chunks) for chunks in full])[places]
            found.dropped[same] = np.array([sum(chunks) for chunks in dropped])[places]
            pipeline = PipelineShape(len(full), len(full[0]), 1, placement)
            last = found.of_loss[same] = pipeline.rank_of(pipeline.stages - 1)
            found.full_last[same], found.dropped_last[same] = full[last][-1], dropped[last][-1]
        return found

    def _passes_of(self, row: int, names: Sequence[str], settings: Settings) -> Passes:
        """Return the passes of a layout, which are those of all with its stages, chunks and micro-batches."""
        features = {name: (self.catalog.feature(name), self.catalog.models[name](**settings.get(name, {}))) for name in names}
        world = World({**self.model, **{name: int(self.columns[name][row]) for name in SIZES}})
        key = (world.pp, world.vpp, world.num_micro_batches, *((name, repr(args)) for name, (_, args) in features.items()))
        if key not in self._passes:
            self._passes[key] = passes_with(world, features) or Passes.of_megatron(world)
        return self._passes[key]

    def _table(
        self,
        formula: Formula,
        counts: Callable[[type[Feature[Any]]], bool],
        rows: Column,
        active: Mapping[str, Mask],
        settings: Settings,
    ) -> Numbers:
        """Return what a formula gives for these layouts, with the features that count for it."""
        key = (formula, rows.tobytes(), *self._counted(counts, rows, active, settings))
        if key not in self._tables:
            counted = {name: mask for name, mask in active.items() if counts(self.catalog.feature(name))}
            self._tables[key] = self._tabulated(formula, rows, counted, settings)
        return self._tables[key]

    def _counted(
        self, counts: Callable[[type[Feature[Any]]], bool], rows: Column, active: Mapping[str, Mask], settings: Settings
    ) -> list[tuple[str, int, bytes]]:
        """Identify the features that count, their settings, and the layouts in which they are active."""
        names = [name for name in active if counts(self.catalog.feature(name))]
        return sorted((name, id(settings.get(name)), active[name][rows].tobytes()) for name in names)

    def _tabulated(self, formula: Formula, rows: Column, active: Mapping[str, Mask], settings: Settings) -> Numbers:
        features = {name: (self.catalog.feature(name), self.catalog.models[name](**settings.get(name, {}))) for name in active}

        def count(some: Column) -> tuple[Any, ...]:
            world = _Jobs({**self.model, **{name: several(self.columns[name][some]) for name in SIZES}})
            return formula(world, {name: features[name] for name, mask in active.items() if several(mask[some])})

        found: dict[int, Numbers] = {}
        size = len(next(iter(self.columns.values())))
        for some, numbers in by_case(count, rows, [self.columns[name] for name in SIZES]):
            for place, number in enumerate(numbers):
                found.setdefault(place, np.zeros(size))[some] = number
        return np.array([column[rows] for column in found.values()])


def _kept(world: World, active: Active) -> tuple[Any, ...]:
    """Count one pass through a chunk, what stays of it when it is dropped, and what a rank has once; then those of the last."""
    layers, options, saved = _layers_of_chunk(world), _options(world, active), list(changes(active, "saved_tensors", world))
    try:
        chunk, last = (chunk_tensors(world, options, saved, layers, last=is_last) for is_last in (False, True))
    except UnknownValue:  # the planner of memory has no bytes then either
        return (0,) * 6
    return (*_bytes(chunk), *_bytes(last))


def _bytes(tensors: SavedTensors) -> tuple[Any, ...]:
    at_peak = [t for t in tensors if t.held in AT_PEAK]
    passes = [t for t in at_peak if not t.once]
    parts = (passes, [t for t in passes if is_outside(t)], [t for t in at_peak if t.once])
    return tuple(sum(t.bytes * t.layers for t in part) for part in parts)


def _resting(world: World, active: Active) -> tuple[Any, ...]:
    """Count what rests on a rank with no end of the model, the first, the last or both, and what is behind its passes."""
    layers = layers_parameters(shape_of_world(world), _layers_of_chunk(world)) * world.vpp
    options, moved = _options(world, active), list(changes(active, "resting", world))
    counts = [parameters_with_ends(world, layers, first, last) for last in (False, True) for first in (False, True)]
    stages = [Stage(0, tuple(resting_rows(world, options, moved, count))) for count in counts]
    return (*(stage.resting for stage in stages), *(stage.behind for stage in stages))


def _layers_of_chunk(world: World) -> LayerCounts:
    """Count the layers of a chunk that has an equal share, rounded up, with experts in as many as possible."""
    shape, chunks = shape_of_world(world), np.asarray(world.pp * world.vpp)

    def share(count: int) -> Any:
        return np.atleast_1d(-(-count // chunks))

    counts = with_most_experts(shape, share(shape.num_layers))
    return LayerCounts(*map(several, map(share, shape.single_layers) if shape.single_layers is not None else counts))


def _options(world: World, active: Active) -> JobOptions:
    switched = {name for feature, _ in active.values() for name in (_SEQUENCE, _OPTIMIZER) if _switches(feature, name)}
    return JobOptions(world.platform == "cpu", _SEQUENCE in switched, _OPTIMIZER in switched)


def changes_bytes(feature: type[Feature[Any]]) -> bool:
    """Return whether a feature counts for the bytes of a layout."""
    return _changes_passes(feature) or _changes_resting(feature) or has_schedule(feature)


def _changes_passes(feature: type[Feature[Any]]) -> bool:
    return implements(feature, "saved_tensors") or _switches(feature, _SEQUENCE)


def _changes_resting(feature: type[Feature[Any]]) -> bool:
    return implements(feature, "resting") or issubclass(feature, ScheduleFeature) or _switches(feature, _OPTIMIZER)


def _switches(feature: type[Feature[Any]], argument: str) -> bool:
    return any(flag.dest == argument and flag.switch == "on" for flag in feature.spec.megatron_flags)
