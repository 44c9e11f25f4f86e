"""Continue a long run: ``--resume`` leaves out what has passed on this source.

Tests that passed are kept in ``build/passed/``, one file for each commit with its local changes.
"""

import hashlib
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[1]


def add_options(parser: pytest.Parser) -> None:
    """The options of this module."""
    parser.addoption("--resume", action="store_true", help="leave out the tests that have passed on this source")


def passed_file() -> Path:
    """Where the tests that passed on this commit with these changes are kept."""
    commands = (["git", "rev-parse", "HEAD"], ["git", "diff", "HEAD"])
    source = b"".join(subprocess.run(command, cwd=ROOT, capture_output=True, check=False).stdout for command in commands)
    return ROOT / "build" / "passed" / hashlib.sha256(source).hexdigest()[:16]


class Passed:
    """Keeps the names of passed tests, and hands those of earlier runs to the processes that select."""

    def __init__(self) -> None:
        self._file = passed_file()
        self._failed: set[str] = set()
        self.before = self._file.read_text(encoding="utf-8").splitlines() if self._file.exists() else []

    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["passed"] = self.before

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.add(report.nodeid)
        elif report.when == "teardown" and report.nodeid not in self._failed:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a", encoding="utf-8") as passed:
                passed.write(f"{report.nodeid}\n")


def select(config: pytest.Config, items: list[pytest.Item], passed: Iterable[str]) -> None:
    """Leave out with ``--resume`` what has passed."""
    done = set(passed) if config.option.resume else set()
    if left_out := [item for item in items if item.nodeid in done]:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.nodeid not in done]
