"""Tests have a budget: an unmarked test takes at most 3 s, the default tests of one feature at most 8 s together.

The time of a test is the smaller of the wall clock and the CPU seconds of its process, its children and its jobs in the
pool, divided by how much slower this machine is at the moment than an idle one: another job beside is no failure. A test
that is the first of its process to import torch or Megatron is not judged. ``@pytest.mark.budget(SECONDS)`` gives a test
that has to start processes more; `long` ones have none. All durations are kept in ``build/durations.json``. A test whose
job leaves process groups or threads in a worker fails as well; of a `long` one that is a warning.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from mindspeed.workbench.verification.pool import WorkerPool
from tests.warm_processes import cpu_seconds

ROOT: Final = Path(__file__).resolve().parents[1]
KEPT: Final = ROOT / "build" / "durations.json"
LIMIT: Final = 3.0
FEATURE_LIMIT: Final = 8.0
SHOWN: Final = 15
PLANNED: Final = 60
"""Features for which the default run must have room; of a run with those of `WHOLE_RUN` or more the time is foretold."""
WHOLE_RUN: Final = 20
TOLERANCE: Final = 2.5
"""How much longer than its budget a test may take before it fails: readings of one test differ by as much in whole runs."""
YARDSTICK: Final = 0.016
"""CPU seconds of `yardstick` on an idle core."""
POOL: Final = pytest.StashKey[WorkerPool]()
_STARTED: Final = pytest.StashKey["Clock"]()
_HEAVY: Final = ("torch", "megatron.core")
_FEATURE: Final = re.compile(r"tests/features/(?:(\w+)/|test_claims\.py::\w+\[([\w-]+)\])")


@dataclass(frozen=True, slots=True)
class Clock:
    """Wall clock and CPU seconds of a moment, and the heavy packages that were imported."""

    wall: float
    cpu: float
    imported: frozenset[str]

    @classmethod
    def now(cls, config: pytest.Config) -> Clock:
        times = os.times()
        pool = config.stash.get(POOL, None)
        cpu = sum(times[:4]) + (pool.cpu_seconds if pool else 0.0) + cpu_seconds()
        return cls(time.perf_counter(), cpu, frozenset(name for name in _HEAVY if name in sys.modules))

    def since(self, start: Clock) -> float:
        """The time of a test that began at ``start``: the smaller of wall clock and CPU seconds."""
        return min(self.wall - start.wall, self.cpu - start.cpu)


def yardstick() -> float:
    """CPU seconds of a fixed piece of work, the best of three."""
    took = []
    for _ in range(3):
        start = time.process_time()
        sum(number * number for number in range(300_000))
        took.append(time.process_time() - start)
    return min(took)


def slowness() -> float:
    """How many times longer than an idle machine this one takes now, at least 1."""
    return max(1.0, yardstick() / YARDSTICK)


def feature_of(test: str) -> str | None:
    """The feature whose test this is, by its folder or the parameter of the claims test."""
    found = _FEATURE.match(test)
    return (found[1] or found[2].replace("-", "_")) if found else None


def over_budget(seconds: float, limit: float) -> str:
    """The message of a test that took too long."""
    return (
        f"took {seconds:.1f} s, and a test of the default run has {limit:.0f} s (tests/budgets.py): make it smaller, or mark "
        "it long where another default test holds the same claim"
    )


class Budgets:
    """Measures each test where it runs, and judges it."""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        item.stash[_STARTED] = Clock.now(item.config)
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        report: Any = yield
        if call.when != "teardown" or _STARTED not in item.stash:
            return report
        start, end = item.stash[_STARTED], Clock.now(item.config)
        seconds = end.since(start)
        mark = item.get_closest_marker("budget")
        limit = float(mark.args[0]) if mark else LIMIT
        long = item.get_closest_marker("long") is not None
        if not long and seconds > limit:
            seconds /= slowness()
        report.user_properties = [*report.user_properties, ("seconds", round(seconds, 2)), ("long", long)]
        if seconds > TOLERANCE * limit and not long and report.passed and start.imported == end.imported:
            report.outcome = "failed"
            report.longrepr = f"{item.nodeid} {over_budget(seconds, limit)}"
        pool = item.config.stash.get(POOL, None)
        if pool is not None and pool.leftovers:
            text = f"{item.nodeid}: {'; '.join(pool.leftovers)}; a job of the pool ends its process groups, threads and modes"
            pool.leftovers.clear()
            if long:
                item.warn(pytest.PytestWarning(text))
            else:
                report.outcome, report.longrepr = "failed", text
        return report


class Durations:
    """Collects the durations of all processes of a run, prints and keeps them, and judges each feature."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._seconds: dict[str, float] = {}
        self._features: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        known = dict(report.user_properties)
        if report.when != "teardown" or "seconds" not in known:
            return
        self._seconds[report.nodeid] = seconds = float(str(known["seconds"]))
        feature = feature_of(report.nodeid)
        if feature and not known["long"]:
            self._features[feature] += seconds

    def too_slow(self) -> dict[str, float]:
        """The features whose default tests take too long together."""
        return {name: seconds for name, seconds in self._features.items() if seconds > FEATURE_LIMIT}

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._seconds:
            KEPT.parent.mkdir(exist_ok=True)
            known = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {}
            KEPT.write_text(json.dumps(dict(sorted({**known, **self._seconds}.items())), indent=1), encoding="utf-8")
        if any(seconds > TOLERANCE * FEATURE_LIMIT * slowness() for seconds in self.too_slow().values()):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not self._seconds:
            return
        minutes, seconds = divmod(round(time.perf_counter() - self._start), 60)
        total = sum(self._seconds.values())
        terminalreporter.section(f"{len(self._seconds)} tests in {minutes}:{seconds:02}, {total:.0f} s of tests; all in {KEPT}")
        for test, took in sorted(self._seconds.items(), key=lambda pair: -pair[1])[:SHOWN]:
            terminalreporter.write_line(f"{took:7.1f} s  {test}")
        if (features := len(self._features)) >= WHOLE_RUN:
            mean, processes = self._features.total() / features, terminalreporter.config.getoption("numprocesses", None) or 1
            more = max(0, PLANNED - features) * mean / processes
            text = f"a feature takes {mean:.1f} s: with {PLANNED} features the run takes {more / 60:.1f} minutes more"
            terminalreporter.write_line(text)
        for name, took in sorted(self.too_slow().items()):
            text = f"the default tests of {name} took {took:.1f} s together, and a feature has {FEATURE_LIMIT:.0f} s"
            terminalreporter.write_line(f"OVER BUDGET {text}")
