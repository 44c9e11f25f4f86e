"""Verify the claims of features on a Megatron checkout, in parallel processes, with a time limit for each and for all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from select import select
from typing import Any, Final

from mindspeed.engine.resolution.environment import version_in
from mindspeed.plugins.feature import FeatureSpec

Row = dict[str, Any]
"""``{"feature", "holds", "problems", "seconds"}``; ``holds`` is None for a feature that has no verdict.

Where the checkout was not asked for one, ``open`` is ``out-of-range`` for a feature that does not support the release,
``not-verified`` for one whose turn did not come, and ``no-verdict`` for one that took too long.
"""

OUT_OF_RANGE: Final = "out-of-range"
END: Final = 10.0
"""Seconds that a process gets to end when it has no more to do."""
_ERROR_LINES: Final = 3


@dataclass(frozen=True, slots=True)
class Limits:
    """Hold the seconds that one feature may take, those after which no feature is begun, and the number of processes."""

    feature: float = 90.0
    total: float = 480.0
    processes: int = 2


class Verifier:
    """A process that imports a checkout and verifies one feature after another."""

    def __init__(self, checkout: Path, module: str = "mindspeed.workbench.verification.claims") -> None:
        path = os.pathsep.join([str(checkout.resolve()), *(entry for entry in sys.path if entry)])
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", module],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, "PYTHONPATH": path},
        )

    def verify(self, name: str, limit: float) -> Row:
        """The row of a feature. Without a verdict after ``limit`` seconds the process is ended."""
        end = time.monotonic() + limit
        source: Any = self._process.stdin
        answers: Any = self._process.stdout
        try:
            source.write(f"{name}\n".encode())
        except BrokenPipeError:
            return _row(name, self._last_errors())
        while select([answers], [], [], max(0.0, end - time.monotonic()))[0]:
            line = answers.readline()
            if not line:
                return _row(name, self._last_errors())
            row: Row = json.loads(line) if line.startswith(b"{") else {}
            if row.get("feature") == name:
                return row
        self._process.kill()
        self._process.wait()
        return _row(name, f"no verdict within {limit:.0f} s", "no-verdict", limit)

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def close(self) -> None:
        """End the process and its workers."""
        try:
            self._process.communicate(timeout=END)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
        self._errors.close()

    def _last_errors(self) -> str:
        self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()[-_ERROR_LINES:]
        return f"the process that verifies claims ended with {self._process.returncode}: {' '.join(lines)}"


def verify_on(checkout: Path, version: str, specs: Mapping[str, FeatureSpec], limits: Limits) -> list[Row]:
    """The row of every feature, in the order of ``specs``.

    One that does not support ``version`` is refused with its range, one whose turn comes after ``limits.total`` is not
    verified. A process that dies or hangs is a row of its feature; the next feature has another process.
    """
    supporting = {name: spec for name, spec in specs.items() if version_in(version, spec.megatron)}
    rows = {name: _row(name, f"needs megatron-core {spec.megatron}", OUT_OF_RANGE) for name, spec in specs.items()}
    waiting, end = deque(supporting), time.monotonic() + limits.total

    def work(_: int) -> list[Row]:
        return list(_in_turn(checkout, waiting, limits, end))

    with ThreadPoolExecutor(limits.processes) as threads:
        for found in threads.map(work, range(min(limits.processes, len(waiting)))):
            rows |= {row["feature"]: row for row in found}
    return [rows[name] for name in specs]


def _in_turn(checkout: Path, waiting: deque[str], limits: Limits, end: float) -> Iterator[Row]:
    """Yield the rows of the features that one of the processes takes from the queue."""
    verifier: Verifier | None = None
    while waiting:
        name = waiting.popleft()
        left = end - time.monotonic()
        if left <= 0:
            yield _row(name, f"not verified: the time limit of {limits.total:.0f} s was reached", "not-verified")
            continue
        verifier = verifier or Verifier(checkout)
        yield verifier.verify(name, limits.feature)
        if verifier.has_ended:
            verifier.close()
            verifier = None
    if verifier is not None:
        verifier.close()


def _row(name: str, problem: str, kind: str = "", seconds: float = 0.0) -> Row:
    """The row of a feature without a verdict: its process has ended, or it is open for the reason ``kind``."""
    verdict = {"holds": None, "open": kind} if kind else {"holds": False}
    return {"feature": name, **verdict, "problems": [problem], "seconds": seconds}


def in_order(names: Iterable[str], verdicts: Mapping[str, Iterable[str]]) -> list[str]:
    """Sort features, those first whose targets differ most: what a new release breaks is seen also when the time is short."""
    urgent = ("changed", "gone", "body changed", "appended")
    rank = {name: min((urgent.index(v) for v in found if v in urgent), default=len(urgent)) for name, found in verdicts.items()}
    return sorted(names, key=lambda name: (rank.get(name, len(urgent)), name))
