"""Rows of the speed table: a target, what was measured, and the command that measures it again."""

from __future__ import annotations

import json
import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from mindspeed.ops.instruction_sets import processor_model

_UNITS: Final = {"s": 1.0, "ms": 1e3}
_T = TypeVar("_T")


@dataclass(frozen=True)
class Row:
    """One measured number. ``note`` says why a missed target is missed; ``least`` that the target is a lower bound.

    ``wall`` is the time on the clock beside CPU time, in the same unit; None for what is no time.
    """

    what: str
    target: float
    measured: float
    unit: str
    command: str
    note: str = ""
    least: bool = False
    wall: float | None = None

    @property
    def met(self) -> bool:
        return self.measured >= self.target if self.least else self.measured <= self.target

    @property
    def bound(self) -> str:
        """The target with its unit, and its direction where it is a lower bound."""
        return f"{'≥ ' if self.least else ''}{self.target:g} {self.unit}"

    @property
    def value(self) -> str:
        """What was measured with its unit, and the clock beside it."""
        wall = "" if self.wall is None else f" ({self.wall:.3g} on the clock)"
        return f"{self.measured:.3g} {self.unit}".rstrip() + wall


class Spent(NamedTuple):
    """Seconds of CPU time, of this process and of those that it waited for, and seconds on the clock."""

    cpu: float
    wall: float

    @classmethod
    def now(cls) -> Spent:
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return cls(time.process_time() + children.ru_utime + children.ru_stime, time.perf_counter())

    def since(self, start: Spent) -> Spent:
        return Spent(self.cpu - start.cpu, self.wall - start.wall)


def timed(what: str, target: float, spent: Spent, unit: str, command: str, note: str = "") -> Row:
    """A row of CPU time, with the time on the clock."""
    return Row(what, target, spent.cpu * _UNITS[unit], unit, command, note, wall=spent.wall * _UNITS[unit])


_smallest: bool = False
_BRIEF: Final = 3
"""Repetitions of ``--brief``."""


@contextmanager
def smallest() -> Iterator[None]:
    """Measure once, at the smallest sizes: it only shows that a benchmark runs."""
    global _smallest
    before, _smallest = _smallest, True
    try:
        yield
    finally:
        _smallest = before


def sized(normal: _T, small: _T) -> _T:
    """Choose the smaller of two sizes within `smallest`."""
    return small if _smallest else normal


def repetitions(normal: int) -> int:
    """How often to measure: once within `smallest`, three times with ``--brief``."""
    return sized(min(normal, _BRIEF) if "--brief" in sys.argv else normal, 1)


def medians(*candidates: Callable[[], object], repeat: int = 9) -> list[Spent]:
    """Median CPU time and clock of each callable, measured interleaved so that drift hits all alike."""
    times: list[list[Spent]] = [[] for _ in candidates]
    for _ in range(repetitions(repeat)):
        for candidate, spent in zip(candidates, times, strict=True):
            start = Spent.now()
            result = candidate()
            spent.append(Spent.now().since(start))
            del result  # whoever calls keeps it; freeing it is not part of the work
    return [middle(spent) for spent in times]


def middle(spent: Sequence[Spent]) -> Spent:
    """Medians of CPU time and of the clock."""
    return Spent(*(statistics.median(each) for each in zip(*spent, strict=True)))


def machine() -> str:
    """Processors and Python version; never a host name."""
    return f"{os.cpu_count()} cores of {processor_model()}, Python {platform.python_version()}"


def read_rows(path: Path) -> list[Row]:
    """The rows that `report` wrote."""
    return [_row(row) for row in json.loads(path.read_text(encoding="utf-8"))["rows"]]


def _row(data: dict[str, Any]) -> Row:
    return Row(**{key: value for key, value in data.items() if key != "met"})


def report(rows: Sequence[Row], path: Path | None = None) -> int:
    """Print the table, write it as JSON next to it, and return how many targets are missed."""
    width = max(len(row.what) for row in rows)
    print(f"{machine()}")
    for row in rows:
        verdict = "ok  " if row.met else "MISS"
        print(f"{verdict} {row.what:<{width}}  {row.value:>12}  (target {row.bound})  {row.command}")
        if row.note:
            print(f"     {row.note}")
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        data = {"machine": machine(), "rows": [asdict(row) | {"met": row.met} for row in rows]}
        path.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return sum(not row.met for row in rows)


def main(rows: Callable[[], list[Row]]) -> None:
    """Entry point of one benchmark file: ``python -m benchmarks.NAME [OUTPUT.json]``."""
    sys.exit(report(rows(), Path(sys.argv[1]) if len(sys.argv) > 1 else None) > 0)
