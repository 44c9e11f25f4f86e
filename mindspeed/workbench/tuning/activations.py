"""Bytes that the chunks of a model keep for backward, for every layout: the planner of memory, tabulated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from mindspeed.job.arithmetic import LayerCounts, all_counts, shape_of_world
from mindspeed.job.world import UnknownValue, World
from mindspeed.memory.estimate import AT_PEAK, chunk_tensors
from mindspeed.memory.layer_tensors import JobOptions
from mindspeed.plugins.answers import changed_tensors, implements
from mindspeed.plugins.discovery import Catalog
from mindspeed.plugins.feature import Feature, FeatureSpec
from mindspeed.plugins.saved_tensors import SavedTensors
from mindspeed.workbench.tuning.layout_jobs import Mask, Settings
from mindspeed.workbench.tuning.several import by_case, several
from mindspeed.workbench.tuning.space import SIZES, Column, Layouts

_PLAIN_FIRST: Final = ("tp", "cp", "micro_batch_size", "ep", "pp", "vpp")
"""Sizes in the order in which a formula that cannot compute with arrays gets one value of each."""


class Kept(NamedTuple):
    """Bytes of one pass through a chunk, of one through the chunk before the loss, and of what a rank keeps once."""

    chunk: Any
    last: Any
    once: Any


class KeptTables:
    """A table of `Kept` for each set of features that change what layers keep, made as `mindspeed.memory.estimate` does."""

    def __init__(self, catalog: Catalog, layouts: Layouts) -> None:
        self.catalog, self.layouts = catalog, layouts
        self._chunks: Column = layouts.pp * layouts.vpp
        self._counts = all_counts(shape_of_world(layouts))
        self._tables: dict[tuple[Any, ...], Kept] = {}

    def of(self, rows: Column, active: Mapping[str, Mask], settings: Settings) -> Kept:
        """Return the bytes of these layouts, with the features that are active in each of them."""
        counted = {name: mask for name, mask in active.items() if _changes_activations(self.catalog.feature(name))}
        features = sorted((name, id(settings.get(name)), mask[rows].tobytes()) for name, mask in counted.items())
        key = (rows.tobytes(), *features)
        if key not in self._tables:
            self._tables[key] = self._tabulated(rows, counted, settings)
        return self._tables[key]

    def _tabulated(self, rows: Column, active: Mapping[str, Mask], settings: Settings) -> Kept:
        args = {name: self.catalog.models[name](**settings.get(name, {})) for name in active}

        def count(some: Column) -> Kept:
            return self._count(some, {name: args[name] for name, mask in active.items() if several(mask[some])})

        found = np.zeros((3, len(self.layouts)))
        for some, kept in by_case(count, rows, [self.layouts.columns[name] for name in _PLAIN_FIRST]):
            for place, size in enumerate(kept):
                found[place, some] = size
        return Kept(*found[:, rows])

    def _count(self, rows: Column, active: Mapping[str, Any]) -> Kept:
        """Count a chunk of these layouts as if they were one."""
        world = World({**self.layouts.model, **{name: several(self.layouts.columns[name][rows]) for name in SIZES}})
        chunks = self._chunks[rows]
        layers = LayerCounts(*(several(-(-np.int64(count) // chunks)) for count in self._counts))
        features = {name: self.catalog.feature(name) for name in active}
        options = JobOptions(world.platform == "cpu", any(_splits_sequence(one.spec) for one in features.values()))
        savers = {name: feature for name, feature in features.items() if implements(feature, "saved_tensors")}
        changes = [changed_tensors(feature, "saved_tensors", active[name], world) for name, feature in savers.items()]
        try:
            chunk, last = (chunk_tensors(world, options, changes, layers, last=is_last) for is_last in (False, True))
        except UnknownValue:  # the planner of memory has no bytes then either
            return Kept(0, 0, 0)
        return Kept(_bytes(chunk), _bytes(last), _bytes(last, once=True))


def _bytes(tensors: SavedTensors, once: bool = False) -> Any:
    return sum(t.bytes * t.layers for t in tensors if t.held in AT_PEAK and t.once == once)


def _changes_activations(feature: type[Feature[Any]]) -> bool:
    return implements(feature, "saved_tensors") or _splits_sequence(feature.spec)


def _splits_sequence(spec: FeatureSpec) -> bool:
    return any(flag.dest == "sequence_parallel" and flag.switch == "on" for flag in spec.megatron_flags)
