"""Rows of the speed table: a target, what was measured, and the command that measures it again."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """One measured number. ``note`` says why a missed target is missed; ``least`` that the target is a lower bound."""

    what: str
    target: float
    measured: float
    unit: str
    command: str
    note: str = ""
    least: bool = False

    @property
    def met(self) -> bool:
        return self.measured >= self.target if self.least else self.measured <= self.target

    @property
    def bound(self) -> str:
        """The target with its unit, and its direction where it is a lower bound."""
        return f"{'≥ ' if self.least else ''}{self.target:g} {self.unit}"


def medians(*candidates: Callable[[], object], repeat: int = 9) -> list[float]:
    """Median seconds of each callable, measured interleaved so that drift hits all alike."""
    times: list[list[float]] = [[] for _ in candidates]
    for _ in range(repeat):
        for candidate, spent in zip(candidates, times, strict=True):
            start = time.perf_counter()
            result = candidate()
            spent.append(time.perf_counter() - start)
            del result  # whoever calls keeps it; freeing it is not part of the work
    return [statistics.median(spent) for spent in times]


def machine() -> str:
    """Processor count and Python version; never a host name."""
    return f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"


def report(rows: Sequence[Row], path: Path | None = None) -> int:
    """Print the table, write it as JSON next to it, and return how many targets are missed."""
    width = max(len(row.what) for row in rows)
    print(f"{machine()}")
    for row in rows:
        verdict = "ok  " if row.met else "MISS"
        print(f"{verdict} {row.what:<{width}}  {row.measured:10.3f} {row.unit:<3} (target {row.bound})  {row.command}")
        if row.note:
            print(f"     {row.note}")
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"machine": machine(), "rows": [asdict(row) | {"met": row.met} for row in rows]}, indent=2))
    return sum(not row.met for row in rows)


def main(rows: Callable[[], list[Row]]) -> None:
    """Entry point of one benchmark file: ``python -m benchmarks.NAME [OUTPUT.json]``."""
    sys.exit(report(rows(), Path(sys.argv[1]) if len(sys.argv) > 1 else None) > 0)
