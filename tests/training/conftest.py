from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from mindspeed.training.corpus import prepare

TINY = (
    *("--num-layers=4", "--hidden-size=32", "--num-attention-heads=4", "--seq-length=32"),
    *("--global-batch-size=4", "--micro-batch-size=2", "--lr=0.01", "--warmup-iters=1"),
    *("--eval-iters=2", "--sample-tokens=2", "--log-interval=1"),
)
"""A model whose step costs milliseconds."""
WORDS = ("many", "few", "ranks", "models", "train", "learn", "split", "weights", "steps", "of", "and", "from", "with", "data")


class Run:
    """``mindspeed pretrain`` as a process; ``done()`` waits for its end."""

    def __init__(self, *arguments: object, **options: object) -> None:
        command = [str(Path(sys.executable).with_name("mindspeed")), "pretrain", *map(str, arguments)]
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("MINDSPEED_", "SLURM_"))}
        environment["OMP_NUM_THREADS"] = "1"
        options.setdefault("env", environment)
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)

    def done(self, status: int = 0) -> Run:
        self.out, self.err = self.process.communicate(timeout=300)
        assert self.process.returncode == status, f"exit status {self.process.returncode}\n{self.out}\n{self.err}"
        return self

    def wait_for_step(self, run: Path, step: int) -> None:
        """Return when the log of the run has the step."""
        end = time.monotonic() + 120
        while not any(row["step"] >= step for row in log(run)):
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < end, "the run does not get on"
            time.sleep(0.1)

    def rank(self, rank: int) -> psutil.Process:
        """The training process of a rank."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        workers = [child for child in children if "mindspeed.training.worker" in child.cmdline()]
        return next(worker for worker in workers if worker.environ().get("RANK") == str(rank))


def log(run: Path) -> list[dict[str, float]]:
    """Complete rows of the log of a run."""
    path = run / "log.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def losses(run: Path) -> dict[int, float]:
    return {int(row["step"]): row["loss"] for row in log(run) if "loss" in row}


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """The prefix of prepared data: words in random order."""
    folder = tmp_path_factory.mktemp("text")
    words = random.Random(0).choices(WORDS, k=40_000)
    (folder / "words.txt").write_text(" ".join(words))
    prepare([str(folder / "words.txt")], str(folder / "words"))
    return str(folder / "words")


@pytest.fixture(scope="session")
def trained(tmp_path_factory, text):
    """A run of one process that has ended after two steps."""
    run = tmp_path_factory.mktemp("trained") / "run"
    Run(*TINY, "--data", text, "--run", run, "--train-iters", 2).done()
    return run


@pytest.fixture
def run(trained, tmp_path):
    """A copy of that run which a test may go on with and destroy."""
    return Path(shutil.copytree(trained, tmp_path / "run"))
