"""Run files of Megatron-LM's unit tests under a plan, and collect one outcome per test.

    python runner.py CHECKOUT RESULTS.jsonl NPROC PLAN FILE...

PLAN is a JSON object with the arguments of ``mindspeed.plan``, or null for Megatron without mindspeed.
One warm process activates the plan and imports Megatron; each file runs in processes forked from it, one per rank, so that
a test that hangs or ends its process costs itself alone. A script, not a module: the checkout's package is called ``tests``
as well.
"""

import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any, Final, TextIO

import pytest

sys.path.append(str(Path(__file__).parents[2]))
from forked_ranks import run_ranks

sys.path.pop()  # or the folder's ``megatron`` would be found instead of Megatron's

TEST_SECONDS: Final = 240
FILE_SECONDS: Final = 3000
RESTARTS: Final = 8
GRACE: Final = 20.0
LEFT_OUT: Final = ("tests/unit_tests/dist_checkpointing/models/test_mlp_glu.py::TestParallelMLPWithGLU::test_oom_is_handled",)
"""Tests that are not run: this one takes more than half of the memory of the machine."""
WARM: Final = (
    "megatron.core.models.gpt",
    "megatron.core.distributed",
    "megatron.core.optimizer",
    "megatron.training.arguments",
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """``state`` is one of passed, skipped, hung, failed and crashed; ``reason`` is the first line of the error."""

    state: str
    reason: str = ""


ORDER: Final = ("passed", "skipped", "hung", "failed", "crashed")
"""States from best to worst: the outcome of several ranks is their worst."""


class Recorder:
    """A pytest plugin that writes one line of JSON per start and per outcome of a test."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._failed: set[str] = set()

    def _write(self, **event: str) -> None:
        self._stream.write(json.dumps(event) + "\n")
        self._stream.flush()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.passed:
            self._write(test=report.nodeid, state=report.outcome, reason=_reason(report))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(start=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.nodeid in self._failed:
            return
        if not report.passed:
            self._failed.add(report.nodeid)
            self._write(test=report.nodeid, state=report.outcome, reason=_reason(report))
        elif report.when == "teardown":
            self._write(test=report.nodeid, state="passed")


def _reason(report: Any) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    text = (
        crash.message
        if crash is not None
        else report.longrepr[2]
        if isinstance(report.longrepr, tuple)
        else report.longreprtext
    )
    lines = [line for line in str(text).splitlines() if line.strip()] or [""]
    return lines[0 if crash is not None else -1][:300]


def run_file(file: str, nproc: int) -> dict[str, Outcome]:
    """``{node id: outcome}`` of one file on ``nproc`` ranks.

    Tests behind one that ends its process run in new processes.
    """
    outcomes: dict[str, Outcome] = {}
    deadline = time.monotonic() + FILE_SECONDS
    for _ in range(RESTARTS):
        ended, found = _run_once(file, nproc, list(outcomes), deadline)
        outcomes |= found
        if ended or not found or time.monotonic() > deadline:
            break
    return outcomes


def _run_once(file: str, nproc: int, known: Sequence[str], deadline: float) -> tuple[bool, dict[str, Outcome]]:
    with TemporaryDirectory() as folder:
        body = partial(_run_tests, file, known, Path(folder))
        statuses = run_ranks(nproc, body, max(0.0, deadline - time.monotonic()), grace=GRACE)
        rows = [_read(Path(folder, f"{rank}.jsonl"), statuses[rank]) for rank in range(nproc)]
    found = {
        test: max((row[test] for _, row in rows if test in row), key=lambda outcome: ORDER.index(outcome.state))
        for test in sorted({test for _, row in rows for test in row})
    }
    return all(ended for ended, _ in rows), found


def _run_tests(file: str, known: Sequence[str], folder: Path, rank: int) -> int:
    log = os.open(os.environ.get("OWN_UNIT_TESTS_LOG", os.devnull), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    arguments = ["-q", "-p", "no:cacheprovider", "-p", "no:rerunfailures", "-o", "addopts="]
    arguments += [f"--timeout={TEST_SECONDS}", "--timeout-method=thread"]
    arguments += [f"--basetemp={folder / f'tmp{rank}'}", *(f"--deselect={test}" for test in (*LEFT_OUT, *known)), file]
    with (folder / f"{rank}.jsonl").open("w", encoding="utf-8") as stream:
        return int(pytest.main(arguments, plugins=[Recorder(stream)]))


def _read(events: Path, status: int) -> tuple[bool, dict[str, Outcome]]:
    """Whether every started test has an outcome, and the outcomes."""
    outcomes: dict[str, Outcome] = {}
    started = None
    for line in events.read_text(encoding="utf-8").splitlines() if events.exists() else ():
        event = json.loads(line)
        if "start" in event:
            started = event["start"]
        else:
            outcomes[event["test"]] = Outcome(event["state"], event.get("reason", ""))
    if started is None or started in outcomes:
        return status in range(6), outcomes
    outcomes[started] = Outcome("hung" if status in (1, -signal.SIGKILL) else "crashed", f"exit status {status}")
    return False, outcomes


def _prepare(checkout: str, nproc: int, plan: dict[str, Any] | None) -> None:
    """Activate the plan, then import what most tests import; nothing may be downloaded."""
    os.chdir(checkout)
    sys.path.insert(0, checkout)
    download: Any = ModuleType("tests.test_utils.python_scripts.download_unit_tests_dataset")
    download.download_and_extract_asset = lambda assets_dir: False
    sys.modules[download.__name__] = download
    os.environ |= {"WORLD_SIZE": str(nproc), "RANK": "0", "LOCAL_RANK": "0"}
    if plan is not None:
        import mindspeed

        mindspeed.activate(mindspeed.plan(**plan))
    for module in WARM:
        importlib.import_module(module)


def main(checkout: str, results: str, nproc: str, plan: str, *files: str) -> None:
    target = Path(results)
    _prepare(checkout, int(nproc), json.loads(plan))
    done = {json.loads(line)["file"] for line in target.read_text().splitlines()} if target.exists() else set()
    for file in files:
        if file in done:
            continue
        began = time.monotonic()
        tests = {test: [outcome.state, outcome.reason] for test, outcome in run_file(file, int(nproc)).items()}
        with target.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({"file": file, "seconds": round(time.monotonic() - began), "tests": tests}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
