from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest

from mindspeed import registry
from mindspeed.engine.planning.checkpoint_state import record_of
from mindspeed.engine.resolution.request import Layer
from mindspeed.registry import probe
from mindspeed.workbench.training.checkpoints import REQUEST, Manifest, checkpoint_path
from mindspeed.workbench.training.corpus import prepare
from mindspeed.workbench.training.job import Job, make_job, write_job
from tests.warm_processes import warm_python

TINY = (
    *("--num-layers=4", "--hidden-size=32", "--num-attention-heads=4", "--seq-length=32"),
    *("--global-batch-size=4", "--micro-batch-size=2", "--lr=0.01", "--warmup-iters=1"),
    *("--eval-iters=2", "--sample-tokens=2", "--log-interval=1"),
)
"""A model whose step costs milliseconds."""
WORDS = ("many", "few", "ranks", "models", "train", "learn", "split", "weights", "steps", "of", "and", "from", "with", "data")


SHAPE = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 32, "global_batch_size": 4}
MakeRun = Callable[..., Path]


class Run:
    """``mindspeed pretrain`` as a process; ``done()`` waits for its end.

    A ``cold`` one shares nothing with other runs: its processes can be signalled, found by their command line, or limited.
    """

    started: ClassVar[list[Run]] = []

    def __init__(self, *arguments: object, cold: bool = False, **options: Any) -> None:
        program = [str(Path(sys.executable).with_name("mindspeed"))] if cold else [*warm_python(), "-m", "mindspeed"]
        command = [*program, "pretrain", *map(str, arguments)]
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("MINDSPEED_", "SLURM_"))}
        environment["OMP_NUM_THREADS"] = "1"
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.process = subprocess.Popen(command, text=True, **{"env": environment, **streams, **options})
        self.started.append(self)

    def done(self, status: int = 0) -> Run:
        self.out, self.err = self.process.communicate(timeout=300)
        assert self.process.returncode == status, f"exit status {self.process.returncode}\n{self.out}\n{self.err}"
        return self

    def wait_for_step(self, run: Path, step: int) -> None:
        """Return when the log of the run has the step; a run may take 120 s for its next step."""
        count, end = 0, time.monotonic() + 120
        while not any(row["step"] >= step for row in log(run)):
            assert self.process.poll() is None, self.process.communicate()
            if len(log(run)) > count:
                count, end = len(log(run)), time.monotonic() + 120
            assert time.monotonic() < end, "the run does not get on"
            time.sleep(0.1)

    def rank(self, rank: int) -> psutil.Process:
        """The training process of a rank."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        workers = [child for child in children if "mindspeed.workbench.training.worker" in child.cmdline()]
        return next(worker for worker in workers if worker.environ().get("RANK") == str(rank))


@pytest.fixture(autouse=True)
def no_run_outlives_its_test() -> Iterator[None]:
    """End what a failed test leaves behind; ranks end with their launcher."""
    yield
    while Run.started:
        Run.started.pop().process.kill()


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


def job_of(layer: Layer, train: dict[str, Any], world_size: int = 1, **options: Any) -> Job:
    """The job of one layer above a saved run, if ``resume`` names one."""
    return make_job([layer], {"command line": train}, replace(probe("cpu"), world_size=world_size), **options)


@pytest.fixture
def make_run(tmp_path: Path, text: str) -> MakeRun:
    """Write the folder of a run that has ended at step 20: its job, and checkpoints without tensors."""

    def make(layer: Layer, world_size: int = 1, steps: tuple[int, ...] = (20,), **train: Any) -> Path:
        run = tmp_path / "run"
        values = {"train_iters": 20, "warmup_iters": 2, "data": text, "run": str(run)} | train
        job = job_of(replace(layer, world=SHAPE | dict(layer.world)), values, world_size)
        write_job(job)
        for step in steps:
            folder = checkpoint_path(run, step)
            folder.mkdir(parents=True)
            for name in ("metadata.json", "common.pt", ".metadata"):
                (folder / name).touch()
            Manifest(step, 4 * step, job.model, job.optimizer, job.source().identity, {}, job.plan.digest).write(folder)
            (folder / REQUEST).write_text(job.request)
            record_of(job.plan, registry.feature_classes(job.plan), registry.content_of(job.plan)).write(folder)
        return run

    return make
