"""The search: score every feasible configuration, and return the best as rows that the resolver has accepted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from pydantic import ValidationError

from mindspeed.engine.resolution.resolution_state import HasVariant
from mindspeed.memory_planner.layouts import LayoutPeaks, Mask, Numbers, changes_bytes
from mindspeed.memory_planner.several import Column
from mindspeed.plugins.answers import answer, implements
from mindspeed.plugins.estimates import Estimate
from mindspeed.workbench.tuning import time as timing
from mindspeed.workbench.tuning.layout_jobs import Feasibility, FixedRequest
from mindspeed.workbench.tuning.space import Choice, Layouts, with_required


@dataclass(frozen=True, slots=True)
class Resolved:
    """A configuration that the resolver took; ``bytes`` of its fullest rank by the planner of memory, None if not known."""

    bytes: int | None = None


Accepts = Callable[[Choice, Mapping[str, Any]], Resolved | None]
"""``(choice, world) -> Resolved``, None where the resolver refuses the configuration."""
SLACK: Final = 1.1
"""Bytes of unequal chunks and of a dry run are fewer than predicted, up to this factor: what is less too large is counted."""
TRIES: Final = 200
"""Configurations that are resolved beside twenty for each row, while those that fit are looked for."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """A configuration with its predictions, and the work of its step by kind."""

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
    """Result of a search; ``rows`` are the best ones by predicted time: those that fit, or where none fits others.

    ``smallest`` has the fewest bytes. Neither time nor memory of the features ``not_modelled`` is predicted, and not the time
    of those ``not_timed``.
    """

    configurations: int
    feasible: int
    fitting: int
    seconds: float
    rows: tuple[Configuration, ...]
    smallest: Configuration | None
    not_modelled: tuple[str, ...]
    not_timed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Question:
    """The search space: layouts and choices, the common request, the machine, and the bytes of a device."""

    layouts: Layouts
    choices: Sequence[Choice]
    request: FixedRequest
    machine: timing.Machine
    device_bytes: float = np.inf


def search(question: Question, catalog: Any, has_variant: HasVariant, accepts: Accepts, top: int = 20) -> Found:
    """Enumerate, filter and score; ``top`` 0 gives all that fit."""
    start = time.perf_counter()
    layouts = question.layouts
    feasibility = Feasibility(catalog, layouts, question.request, has_variant)
    scores = Scores(question, catalog)
    parts = []
    for number, choice in enumerate(question.choices):
        taken, active = feasibility.taken(choice)
        good = np.flatnonzero(taken & layouts.whole_batches)
        if good.size:
            held = scores.bytes(choice, good, active)
            parts.append((np.full(good.size, number), good, scores.seconds(choice)[good], held))
    if not parts:
        spent = time.perf_counter() - start
        return Found(len(layouts) * len(question.choices), 0, 0, spent, (), None, scores.not_modelled, scores.not_timed)
    numbers, rows, seconds, held = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    several = np.array([len(choice.features) for choice in question.choices])[numbers]
    order = np.lexsort((several, seconds, held > SLACK * question.device_bytes))  # of equal ones the plainest
    spent = time.perf_counter() - start
    fitting: list[Configuration] = []
    others: list[Configuration] = []
    seen: set[tuple[int, float, float]] = set()
    for place in _tried(order, held, top):
        if top and len(fitting) >= top:
            break
        choice, row = question.choices[numbers[place]], int(rows[place])
        same = (row, float(seconds[place]), float(held[place]))
        if top and same in seen:  # a feature more that changes nothing, such as a second algorithm for a group of one
            continue
        seen.add(same)
        if (resolved := accepts(choice, layouts.world(row))) is not None:
            held[place] = held[place] if resolved.bytes is None else resolved.bytes
            fits = bool(held[place] <= question.device_bytes)
            (fitting if fits else others).append(_row(scores, choice, row, float(seconds[place]), int(held[place]), fits))
        else:
            held[place] = np.inf
    fitting.sort(key=lambda row: row.predicted_seconds)
    least = int(held.argmin())
    fewest = (int(rows[least]), float(seconds[least]), int(held[least]))
    return Found(
        configurations=len(layouts) * len(question.choices),
        feasible=len(order),
        fitting=int((held <= question.device_bytes).sum()),
        seconds=spent,
        rows=tuple((fitting or others)[: top or None]),
        smallest=_row(scores, question.choices[numbers[least]], *fewest, False),
        not_modelled=scores.not_modelled,
        not_timed=scores.not_timed,
    )


def _tried(order: Any, held: Numbers, top: int) -> Iterator[int]:
    """Yield the fastest configurations, then those with the fewest bytes, as many of each as are resolved for ``top`` rows."""
    count = 20 * top + TRIES if top else len(order)
    yield from map(int, order[:count])
    yield from map(int, sorted(order[count:], key=held.__getitem__)[:count])


def _row(scores: Scores, choice: Choice, row: int, seconds: float, held: int, fits: bool) -> Configuration:
    layouts = scores.layouts
    work = {kind: float(np.broadcast_to(values, len(layouts))[row]) for kind, values in scores.work(choice).items()}
    return Configuration(choice, layouts.sizes(row), seconds, held, fits, work)


class Scores:
    """Predictions of a question, for the features of one choice at a time."""

    def __init__(self, question: Question, catalog: Any) -> None:
        self.layouts, self.machine, self.catalog = question.layouts, question.machine, catalog
        self.request = question.request
        self._peaks = LayoutPeaks(catalog, question.layouts.model, question.layouts.columns)
        self._time = timing.basis(question.layouts, question.machine.cores)
        self._estimates: dict[tuple[str, str], Estimate] = {}
        self._seconds: dict[tuple[int, ...], Numbers] = {}
        tried = {name for choice in question.choices for name in choice.features} | set(self.request.features)
        untimed = [name for name in sorted(tried & catalog.usable.keys()) if not implements(catalog.feature(name), "estimate")]
        self.not_modelled = tuple(name for name in untimed if not changes_bytes(catalog.feature(name)))
        self.not_timed = tuple(name for name in untimed if name not in self.not_modelled)

    def seconds(self, choice: Choice) -> Numbers:
        """Return the seconds of a step in every layout."""
        estimates = tuple(self.estimates(choice))
        key = tuple(map(id, estimates))
        if key not in self._seconds:
            work = timing.work_of(self._time, estimates)
            seconds = timing.step_seconds(work, self.machine, self._time.ranks_per_core)
            self._seconds[key] = np.broadcast_to(seconds, len(self.layouts))
        return self._seconds[key]

    def bytes(self, choice: Choice, rows: Column, active: Mapping[str, Mask]) -> Numbers:
        """Return the bytes of the fullest rank in these layouts; ``active`` gives the layouts in which the choice has each
        feature."""
        return self._peaks.of(rows, active, {**self.request.settings, **choice.settings})

    def work(self, choice: Choice) -> dict[str, Any]:
        """Return the work of every layout by kind."""
        return timing.work_of(self._time, self.estimates(choice))

    def estimates(self, choice: Choice) -> Iterator[Estimate]:
        settings = {**self.request.settings, **choice.settings}
        for name in sorted(with_required((*self.request.features, *choice.features), self.catalog)):
            feature = self.catalog.feature(name)
            if not implements(feature, "estimate"):
                continue
            key = (name, repr(settings.get(name, {})))
            if key not in self._estimates:
                try:
                    args = self.catalog.models[name](**settings.get(name, {}))
                except ValidationError:
                    continue
                self._estimates[key] = answer(feature, "estimate", args, self.layouts)
            yield self._estimates[key]
