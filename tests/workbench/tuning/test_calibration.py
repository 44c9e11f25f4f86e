"""A calibration that is killed loses one run, goes on from its store, and gives the table of one that was not."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from mindspeed.cli import main
from mindspeed.workbench.tuning import measure as measuring
from mindspeed.workbench.tuning.measure import Store, measure
from mindspeed.workbench.tuning.search import Configuration
from mindspeed.workbench.tuning.space import Choice

WORDS = ("tune", "--world-size", "2", "--num-layers", "2", "--calibrate", "5", "--top", "8", "--json")
PROGRAM = """
import sys, time
from mindspeed.workbench.tuning import measure
from tests.workbench.tuning.test_calibration import pretended

def run(job, ranks, steps):
    time.sleep(float(sys.argv[1]))
    return pretended(job, ranks, steps)

measure.run_job = run
from mindspeed.cli import main
main(sys.argv[2:])
"""


def pretended(job: Any, ranks: int, steps: int) -> float:
    """Seconds that depend on the whole job, in place of a run."""
    return 0.1 + sum(json.dumps(job, sort_keys=True).encode()) % 97 / 100


def tuned(store: Path, *words: str) -> tuple[dict[str, Any], str]:
    result = CliRunner().invoke(main, [*WORDS, "--store", str(store), *words])
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    data.pop("search_seconds")
    return data, result.stderr


def dying_after(runs: int) -> Callable[..., float]:
    done: list[int] = []

    def run(job: Any, ranks: int, steps: int) -> float:
        done.append(1)
        if len(done) > runs:
            raise KeyboardInterrupt
        return pretended(job, ranks, steps)

    return run


@pytest.mark.long
def test_an_interrupted_calibration_gives_the_same_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "run_job", pretended)
    whole, said = tuned(tmp_path / "whole")
    assert said.count("run ") == 5
    assert "s left" in said
    monkeypatch.setattr(measuring, "run_job", dying_after(3))
    CliRunner().invoke(main, [*WORDS, "--store", str(tmp_path / "parts")])
    assert len(list((tmp_path / "parts").glob("*/*/*.json"))) == 3
    monkeypatch.setattr(measuring, "run_job", pretended)
    resumed, said = tuned(tmp_path / "parts")
    assert said.count("run ") == 2
    assert resumed == whole
    assert tuned(tmp_path / "parts")[1] == ""


def test_runs_of_the_best_rows_do_not_change_the_next_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "run_job", pretended)
    first, said = tuned(tmp_path, "--mode", "mixed")
    assert said.count("run ") > 5
    assert tuned(tmp_path, "--mode", "mixed") == (first, "")


@pytest.mark.long
def test_a_killed_calibration_gives_the_same_table(tmp_path: Path) -> None:
    def start(store: str, pause: float) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", PROGRAM, str(pause), *WORDS, "--store", str(tmp_path / store)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    killed, end = start("parts", 0.5), time.monotonic() + 120
    while len(list((tmp_path / "parts").glob("*/*/*.json"))) < 2:
        assert killed.poll() is None, killed.communicate()
        assert time.monotonic() < end
        time.sleep(0.05)
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate()
    tables = []
    for store in ("whole", "parts"):
        out, err = start(store, 0).communicate(timeout=300)
        data = json.loads(out)
        data.pop("search_seconds")
        tables.append((data, err.count("run ")))
    (whole, runs), (resumed, rest) = tables
    assert (runs, rest) in ((5, 3), (5, 2))  # the file of a run may appear just before its process dies
    assert resumed == whole


def rows(count: int) -> list[Configuration]:
    return [Configuration(Choice(), {"tp": number}, 1.0, 1, True, {"step": 1.0}) for number in range(count)]


def test_a_budget_ends_the_measuring_and_says_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def run(job: Any, ranks: int, steps: int) -> float:
        now[0] += 10
        return 1.0

    monkeypatch.setattr(measuring, "run_job", run)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    said: list[str] = []
    known = measure(rows(4), lambda row: {}, Store(tmp_path, {}, {}), 1, 1, 15, said.append)
    assert len(known) == 2
    assert said == [
        "run 1/4: tp=0; -",
        "run 2/4: tp=1; -; 30 s left",
        "the time budget of 15 s is used up; 2 runs remain for the next search",
    ]


def test_a_damaged_measurement_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "run_job", pretended)
    store = Store(tmp_path, {}, {})
    (row,) = rows(1)
    measure([row], lambda row: {}, store, 1, 1, 60, lambda text: None)
    store.file_of(row.key).write_text('{"key": ')
    said: list[str] = []
    measure([row], lambda row: {}, store, 1, 1, 60, said.append)
    assert len(said) == 1
    assert store.measurements().keys() == {row.key}


@pytest.mark.long
def test_two_real_runs_calibrate(tmp_path: Path) -> None:
    small = ["--world-size", "1", "--num-layers", "1", "--hidden-size", "32", "--seq-length", "32"]
    result = CliRunner().invoke(
        main, ["tune", *small, "--calibrate", "2", "--steps", "2", "--json", "--top", "3", "--store", str(tmp_path)]
    )
    assert result.exit_code == 0, result.output
    found = [json.loads(path.read_text()) for path in tmp_path.glob("*/*/*.json")]
    assert len(found) == 2
    assert all(row["seconds"] > 0 for row in found)
