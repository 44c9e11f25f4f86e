"""The search: score every feasible configuration, and give the best as rows that the resolver has taken."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from pydantic import ValidationError

from mindspeed.plugins.estimates import Estimate
from mindspeed.tuning import memory
from mindspeed.tuning import time as timing
from mindspeed.tuning.rules import FixedRequest, HasVariant, Rules
from mindspeed.tuning.space import SIZES, Choice, Layouts, with_required

Accepts = Callable[[Choice, Mapping[str, Any]], bool]
"""``(choice, world) -> bool``: whether the resolver takes a configuration."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """One configuration with what is predicted of it, and the work of its step by kind."""

    choice: Choice
    sizes: Mapping[str, int]
    predicted_seconds: float
    predicted_bytes: int
    fits: bool
    work: Mapping[str, float] = field(repr=False)
    measured_seconds: float | None = None

    @property
    def key(self) -> str:
        """Identify the configuration in a store."""
        return key_of(self.sizes, self.choice)


def key_of(sizes: Mapping[str, int], choice: Choice) -> str:
    """Describe a configuration by its sizes and choice."""
    return f"{','.join(f'{name}={value}' for name, value in sorted(sizes.items()))}; {choice}"


@dataclass(frozen=True, slots=True)
class Found:
    """Result of a search; ``rows`` are the best ones by predicted time, those that fit first."""

    configurations: int
    feasible: int
    fitting: int
    seconds: float
    rows: tuple[Configuration, ...]
    smallest: int
    smallest_key: str
    not_modelled: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Question:
    """What is searched: layouts and choices, the request that all have, the machine, and the bytes of a device."""

    layouts: Layouts
    choices: Sequence[Choice]
    request: FixedRequest
    machine: timing.Machine
    device_bytes: float = np.inf
    groups: Mapping[str, Any] = field(default_factory=dict)


def search(question: Question, catalog: Any, has_variant: HasVariant, accepts: Accepts, top: int = 20) -> Found:
    """Enumerate, filter and score; ``top`` 0 gives all feasible ones."""
    start = time.perf_counter()
    layouts = question.layouts
    rules = Rules(catalog, layouts, question.request, has_variant)
    scores = Scores(question, catalog)
    parts = []
    for number, choice in enumerate(question.choices):
        good = np.flatnonzero(rules.feasible(choice) & layouts.whole_batches)
        if good.size:
            seconds, held = scores.of(choice)
            parts.append((np.full(good.size, number), good, seconds[good], held[good]))
    if not parts:
        spent = time.perf_counter() - start
        return Found(len(layouts) * len(question.choices), 0, 0, spent, (), 0, "", scores.not_modelled)
    numbers, rows, seconds, held = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    fits = held <= question.device_bytes
    several = np.array([len(choice.features) for choice in question.choices])[numbers]
    order = np.lexsort((several, seconds, ~fits))  # of equal ones the plainest
    spent = time.perf_counter() - start
    kept: list[Configuration] = []
    seen: set[tuple[int, float, float]] = set()
    for place in order:
        if top and len(kept) == top:
            break
        choice, row = question.choices[numbers[place]], int(rows[place])
        same = (row, float(seconds[place]), float(held[place]))
        if top and same in seen:  # a feature more that changes nothing, such as a second algorithm for a group of one
            continue
        seen.add(same)
        if accepts(choice, layouts.world(row)):
            kept.append(_row(scores, choice, row, float(seconds[place]), int(held[place]), bool(fits[place])))
    return Found(
        configurations=len(layouts) * len(question.choices),
        feasible=len(order),
        fitting=int(fits.sum()),
        seconds=spent,
        rows=tuple(kept),
        smallest=int(held.min()),
        smallest_key=key_of(_sizes(layouts, int(rows[held.argmin()])), question.choices[numbers[held.argmin()]]),
        not_modelled=scores.not_modelled,
    )


def _row(scores: Scores, choice: Choice, row: int, seconds: float, held: int, fits: bool) -> Configuration:
    layouts = scores.layouts
    work = {kind: float(np.broadcast_to(values, len(layouts))[row]) for kind, values in scores.work(choice).items()}
    return Configuration(choice, _sizes(layouts, row), seconds, held, fits, work)


def _sizes(layouts: Layouts, row: int) -> dict[str, int]:
    return {name: int(layouts.columns[name][row]) for name in SIZES}


class Scores:
    """Predictions of a question, for the features of one choice at a time."""

    def __init__(self, question: Question, catalog: Any) -> None:
        self.layouts, self.machine, self.catalog = question.layouts, question.machine, catalog
        self.request = question.request
        self._memory = memory.basis(question.layouts)
        self._time = timing.basis(question.layouts, question.machine.cores)
        self._estimates: dict[tuple[str, str], Estimate] = {}
        tried = {name for choice in question.choices for name in choice.features} | set(self.request.features)
        specs = catalog.specs
        self.not_modelled = tuple(sorted(name for name in tried if name in specs and specs[name].estimate is None))

    def of(self, choice: Choice) -> tuple[memory.Numbers, memory.Numbers]:
        """Return seconds and bytes of every layout."""
        estimates = list(self.estimates(choice))
        work = timing.work_of(self._time, estimates)
        size = len(self.layouts)
        seconds = timing.step_seconds(work, self.machine, self._time.ranks_per_core)
        return np.broadcast_to(seconds, size), np.broadcast_to(memory.peak_bytes(self._memory, estimates), size)

    def work(self, choice: Choice) -> dict[str, Any]:
        """Return the work of every layout by kind."""
        return timing.work_of(self._time, self.estimates(choice))

    def estimates(self, choice: Choice) -> Iterator[Estimate]:
        settings = {**self.request.settings, **choice.settings}
        for name in sorted(with_required((*self.request.features, *choice.features), self.catalog)):
            spec = self.catalog.specs[name]
            if spec.estimate is None:
                continue
            key = (name, repr(settings.get(name, {})))
            if key not in self._estimates:
                try:
                    args = self.catalog.models[name](**settings.get(name, {}))
                except ValidationError:
                    continue
                self._estimates[key] = spec.estimate(args, self.layouts)
            yield self._estimates[key]
