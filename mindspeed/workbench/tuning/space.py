"""The space of a search: every layout as columns of numbers, and every choice of features and settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Final

import numpy as np

from mindspeed.job.hybrid_pattern import pattern_of, segmented
from mindspeed.job.world import World
from mindspeed.memory_planner.several import Column
from mindspeed.plugins.answers import answer, implements
from mindspeed.plugins.constraints import Slot
from mindspeed.plugins.discovery import Catalog

SIZES: Final = ("tp", "pp", "vpp", "cp", "ep", "micro_batch_size")
"""Values of the world that a search varies; all others are fixed."""
PATTERN: Final = "hybrid_layer_pattern"
LARGEST_MICRO_BATCH: Final = 16


@dataclass(frozen=True, slots=True)
class Choice:
    """Features that are switched on in a configuration in addition to those of the request, with their settings."""

    features: tuple[str, ...] = ()
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __str__(self) -> str:
        words = []
        for name in self.features:
            values = " ".join(f"{key}={value}" for key, value in self.settings.get(name, {}).items())
            words.append(f"{name}({values})" if values else name)
        return ", ".join(words) or "-"


class Layouts:
    """Every combination of sizes, one row each: columns by the names of the world, with ``dp`` and ``num_micro_batches``.

    Attributes are fixed values of the model and columns, so that formulas read it as they read a world.
    """

    def __init__(self, model: Mapping[str, Any], candidates: Mapping[str, Sequence[int]]) -> None:
        self.model = {name: value for name, value in model.items() if name not in SIZES}
        self.given_pattern = str(model.get(PATTERN) or "")
        if self.given_pattern:
            self.model[PATTERN] = self.given_pattern.replace("|", "")
        self.fixed = World(self.model)
        self.candidates = {name: sorted(candidates[name]) for name in SIZES}
        grid = np.meshgrid(*(np.array(self.candidates[name], dtype=np.int64) for name in SIZES), indexing="ij")
        columns = {name: values.reshape(-1) for name, values in zip(SIZES, grid, strict=True)}
        spread = columns["tp"] * columns["pp"] * columns["cp"]
        columns["dp"] = np.maximum(1, self.model["world_size"] // spread)
        columns["num_micro_batches"] = self.model["global_batch_size"] // (columns["micro_batch_size"] * columns["dp"])
        self.divides = self.model["world_size"] % spread == 0
        whole = self.model["global_batch_size"] % (columns["micro_batch_size"] * columns["dp"]) == 0
        self.columns = columns
        self.whole_batches = whole & (columns["num_micro_batches"] > 0)

    def __len__(self) -> int:
        return len(self.divides)

    def __getattr__(self, name: str) -> Any:
        own = self.__dict__
        if name in own.get("columns", {}):
            return own["columns"][name]
        if "fixed" not in own:
            raise AttributeError(name)
        return getattr(own["fixed"], name)

    def knows(self, name: str) -> bool:
        """Return whether ``name`` has a value."""
        return name in self.columns or self.fixed.knows(name)

    def need(self, *names: str) -> None:
        """Raise UnknownValue for those that have none."""
        self.fixed.need(*(name for name in names if name not in self.columns))

    def distinct(self, fields: Iterable[str]) -> tuple[Column, Column]:
        """Return a row for each combination of these columns, and for each row the number of its combination."""
        code = np.zeros(len(self), dtype=np.int64)
        for column in (self.columns[name] for name in fields):
            code = code * (int(column.max()) + 1) + column
        _, rows, inverse = np.unique(code, return_index=True, return_inverse=True)
        return rows, inverse

    def sizes(self, row: int) -> dict[str, int]:
        """Return the varied sizes of one row."""
        return {name: int(self.columns[name][row]) for name in SIZES}

    def varied(self, row: int) -> dict[str, Any]:
        """Return the values of the world in which rows differ: sizes, and the pattern of a hybrid model in segments."""
        return with_segments(self.sizes(row), self.given_pattern)

    def world(self, row: int) -> dict[str, Any]:
        """Return the values of the world of one row."""
        return {**self.model, **self.varied(row)}


def with_segments(sizes: Mapping[str, Any], pattern: str) -> dict[str, Any]:
    """Return the sizes of a layout, with the pattern of a hybrid model in segments where stages have several chunks."""
    chunks = sizes["pp"] * sizes["vpp"] if sizes["vpp"] > 1 else 1
    return {**sizes, PATTERN: segmented(pattern, chunks)} if pattern else dict(sizes)


def candidates(model: Mapping[str, Any], pinned: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return the values of each size that a job of this model and number of ranks may have; ``pinned`` fixes some."""
    ranks, chunks = int(model["world_size"]), int(model["num_layers"])
    if (split := len(pattern_of(model.get(PATTERN) or "").segments)) > 1:
        chunks = split
    shares = _divisors(ranks)
    stages = [size for size in shares if chunks % size == 0]
    batches = [size for size in _divisors(int(model["global_batch_size"])) if size <= LARGEST_MICRO_BATCH]
    found = {
        "tp": shares,
        "pp": stages,
        "vpp": _divisors(chunks) if len(stages) > 1 else [1],
        "cp": [size for size in shares if model["seq_length"] % size == 0],
        "ep": shares if model["num_experts"] else [1],
        "micro_batch_size": batches,
    }
    return found | {name: [int(pinned[name])] for name in SIZES if name in pinned}


def choices(catalog: Catalog, model: Mapping[str, Any], requested: Sequence[str], tried: Sequence[str]) -> list[Choice]:
    """Return every choice: each feature with variants off or on, one holder of context parallelism, the tried ones."""
    world = World(model)
    holders = [name for name in catalog.usable if Slot.CONTEXT_PARALLEL in catalog.specs[name].slots]
    options: list[list[Choice]] = []
    if not set(holders) & set(requested):
        options.append([Choice(), *(Choice((name,)) for name in holders)])
    for name in catalog.specs:
        feature = catalog.feature(name)
        if name in requested or name in holders or not (implements(feature, "variants") or name in tried):
            continue
        settings = list(answer(feature, "variants", feature.Args.model_construct(), world) or [{}])
        options.append([Choice(), *(Choice((name,), {name: values} if values else {}) for values in settings)])
    plainest: dict[tuple[Any, ...], Choice] = {}
    for choice in sorted(map(_joined, product(*options)), key=lambda choice: len(choice.features)):
        plainest.setdefault((with_required(choice.features, catalog), repr(sorted(choice.settings.items()))), choice)
    return list(plainest.values())


def with_required(names: Iterable[str], catalog: Catalog) -> frozenset[str]:
    """Return these features and all that they require in every world."""
    found: set[str] = set()
    queue = [name for name in names if name in catalog.usable]
    while queue:
        name = queue.pop()
        if name not in found:
            found.add(name)
            queue += [c.name for c in catalog.requires[name] if c.when is None and c.name in catalog.usable]
    return frozenset(found)


def _joined(parts: Sequence[Choice]) -> Choice:
    settings = {name: values for part in parts for name, values in part.settings.items()}
    return Choice(tuple(name for part in parts for name in part.features), settings)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
