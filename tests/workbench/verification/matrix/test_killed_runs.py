"""A run of the matrix and a bisect that are killed go on where they were: no finished case is judged again."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

LIMIT = 240.0
FINE = {f"{letter}_fine": "harmless" for letter in "abcdef"}
NAMES = [name.replace("_", "-") for name in FINE]


@pytest.fixture
def start(planted, monkeypatch) -> Callable[..., subprocess.Popen[str]]:
    """Start a command of mindspeed in a process of its own, which has the planted features."""
    folder = planted(**FINE, g_raises="raises")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]))

    def begin(*words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "mindspeed", *words]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    return begin


def lines_of(path: Path) -> list[str]:
    """The names of the cases in a store, one for each line that is whole."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line)["name"] for line in text.splitlines(keepends=True)[1:] if line.endswith("\n")]


def kill_after(process: subprocess.Popen[str], path: Path, count: int) -> None:
    """End a process as ``kill -9`` does, once its store has so many verdicts."""
    end = time.monotonic() + LIMIT
    while len(lines_of(path)) < count and process.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGKILL)
    process.communicate()


@pytest.mark.long
def test_a_killed_run_of_the_matrix_goes_on_where_it_was(start, store) -> None:
    words = ["features", "matrix", "run", "--only", "a-fine", "--layout", "all", "--store", str(store.path), "--json"]
    kill_after(start(*words), store.path, 3)
    finished = lines_of(store.path)
    assert len(finished) >= 3
    process = start(*words)
    said = json.loads(process.communicate(timeout=LIMIT)[0])
    names = lines_of(store.path)
    assert len(names) == len(set(names)) == said["cases"]
    assert {result["name"] for result in said["judged"]} == set(names) - set(finished)


@pytest.mark.long
def test_a_killed_bisect_goes_on_where_it_was(start, store) -> None:
    features = ",".join([*NAMES, "g-raises"])
    words = ["features", "bisect", "--features", features, "--platform", "cpu", "--store", str(store.path), "--json"]
    kill_after(start(*words), store.path, 2)
    finished = lines_of(store.path)
    said = json.loads(start(*words).communicate(timeout=LIMIT)[0])
    assert said["culprits"] == ["g-raises"]
    names = lines_of(store.path)
    assert len(names) == len(set(names)) > len(finished)


@pytest.mark.long
def test_a_run_after_a_change_judges_exactly_the_cases_that_it_can_reach(start, store, tmp_path) -> None:
    words = ["features", "matrix", "run", "--only", "a-fine", "--layout", "tp2,pp2", "--store", str(store.path), "--json"]
    assert start(*words).wait(timeout=LIMIT) == 0
    assert json.loads(start(*words).communicate(timeout=LIMIT)[0])["judged"] == []
    source = tmp_path / "planted" / "planted_b_fine.py"
    source.write_text(source.read_text().replace("output * 1.5", "output * 1.25"))
    assert json.loads(start(*words).communicate(timeout=LIMIT)[0])["judged"] == []
    source = tmp_path / "planted" / "planted_a_fine.py"
    source.write_text(source.read_text().replace("output * 1.5", "output * 1.25"))
    judged = json.loads(start(*words).communicate(timeout=LIMIT)[0])["judged"]
    assert {result["name"] for result in judged} == {"a-fine @ tp2", "a-fine @ pp2"}
