"""Bytes that the chunks of a model keep for backward, for every layout: the planner of memory, tabulated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mindspeed.job.world import UnknownValue
from mindspeed.memory.estimate import AT_PEAK, JobOptions, chunk_tensors
from mindspeed.plugins.answers import changed_tensors, implements
from mindspeed.plugins.discovery import Catalog
from mindspeed.plugins.feature import Feature, FeatureSpec
from mindspeed.tuning.layout_jobs import VARIED, Mask, ReadWorld, Settings
from mindspeed.tuning.space import SIZES, Column, Layouts

Numbers = NDArray[np.float64]


class Kept(NamedTuple):
    """Bytes of one pass through a chunk, of one through the chunk before the loss, and of what a rank keeps once."""

    chunk: Numbers
    last: Numbers
    once: Numbers


class KeptTables:
    """One table of `Kept` for each set of features that change what layers keep, made as `mindspeed.memory.estimate` does.

    Micro-batches of one and of two sequences are counted, once for each distinct combination of the sizes that are read: bytes
    grow evenly with the sequences, but for what does not depend on them, such as a mask.
    """

    def __init__(self, catalog: Catalog, layouts: Layouts) -> None:
        self.catalog, self.layouts = catalog, layouts
        self._layers: Column = np.maximum(1, layouts.num_layers // (layouts.pp * layouts.vpp))
        self._tables: dict[tuple[Any, ...], Numbers] = {}

    def of(self, rows: Column, active: Mapping[str, Mask], settings: Settings) -> Kept:
        """Return the bytes of these layouts, with the features that are active in each of them."""
        counted = {name: mask for name, mask in active.items() if _changes_activations(self.catalog.feature(name))}
        key = tuple(sorted((name, id(settings.get(name)), mask.tobytes()) for name, mask in counted.items()))
        if key not in self._tables:
            self._tables[key] = self._tabulated(counted, settings)
        one, two = self._tables[key][:, :, rows]
        return Kept(*(one + (two - one) * (self.layouts.micro_batch_size[rows] - 1)))

    def _tabulated(self, active: Mapping[str, Mask], settings: Settings) -> Numbers:
        args = {name: self.catalog.models[name](**settings.get(name, {})) for name in active}
        fields = {"tp", "cp"}
        while True:
            read: set[str] = set()
            rows, inverse = self.layouts.distinct(sorted(fields), self._layers, *active.values())
            found = np.empty((2, 3, len(rows)))
            kinds = np.array([self._layers[rows], self.layouts.columns["cp"][rows], *(mask[rows] for mask in active.values())])
            for kind in np.unique(kinds, axis=1).T:  # formulas take sizes as arrays, but not layers, cp and features
                here = np.flatnonzero((kind == kinds.T).all(axis=1))
                present = {name: args[name] for name, is_active in zip(active, kind[2:], strict=True) if is_active}
                for batch in (1, 2):
                    found[batch - 1, :, here] = self._counted(present, int(kind[0]), rows[here], read, batch).T
            read &= VARIED
            if read <= {*fields, "micro_batch_size"}:
                return found[:, :, inverse]
            fields |= read - {"micro_batch_size"}

    def _counted(self, active: Mapping[str, Any], layers: int, rows: Column, read: set[str], batch: int) -> Numbers:
        """Count a chunk of these layouts, at once or, where a feature has a formula that takes no arrays, one by one."""
        sizes = {name: self.layouts.columns[name][rows] for name in SIZES} | {"micro_batch_size": batch}
        sizes["cp"] = int(sizes["cp"][0])
        try:
            return self._count(active, layers, sizes, read)
        except (TypeError, ValueError):
            columns = {name: np.broadcast_to(column, len(rows)) for name, column in sizes.items()}
            each = [{name: int(column[number]) for name, column in columns.items()} for number in range(len(rows))]
            return np.concatenate([self._count(active, layers, own, read) for own in each], axis=1)

    def _count(self, active: Mapping[str, Any], layers: int, sizes: Mapping[str, Any], read: set[str]) -> Numbers:
        specs = self.catalog.specs
        world = ReadWorld({**self.layouts.model, **sizes}, read)
        options = JobOptions(world.platform == "cpu", any(_splits_sequence(specs[name]) for name in active))
        features = {name: self.catalog.feature(name) for name in active}
        changes = [
            changed_tensors(feature, "saved_tensors", active[name], world)
            for name, feature in features.items()
            if implements(feature, "saved_tensors")
        ]
        found = np.zeros((3, np.size(sizes["tp"])))
        try:
            chunk, last = (chunk_tensors(world, options, changes, layers, last=is_last) for is_last in (False, True))
        except UnknownValue:  # the planner of memory has no bytes then either
            return found
        for place, tensors, once in ((0, chunk, False), (1, last, False), (2, last, True)):
            found[place] = sum(t.bytes * t.layers for t in tensors if t.held in AT_PEAK and t.once == once)
        return found


def _changes_activations(feature: type[Feature[Any]]) -> bool:
    return implements(feature, "saved_tensors") or _splits_sequence(feature.spec)


def _splits_sequence(spec: FeatureSpec) -> bool:
    return any(flag.dest == "sequence_parallel" and flag.switch == "on" for flag in spec.megatron_flags)
