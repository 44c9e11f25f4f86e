"""Checkpoints that are written while training goes on: ``mindspeed pretrain --async-save``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mindspeed.workbench.training.checkpoints import read_manifest, saved_steps
from tests.workbench.training.conftest import TINY, Run, losses

ROOT = Path(__file__).resolve().parents[3]
SLOW = """
import os, time

fsync, own = os.fsync, os.getpid()


def slow(descriptor):
    if os.getpid() != own and "distcp" in os.readlink(f"/proc/self/fd/{descriptor}"):
        time.sleep(SECONDS)
    fsync(descriptor)


os.fsync = slow
"""
"""A disk on which the files of tensors take a while, in the processes that a rank starts."""


def slow_disk(folder: Path, seconds: float) -> dict[str, str]:
    """Return the environment of a run on a slow disk."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(SLOW.replace("SECONDS", str(seconds)))
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("MINDSPEED_", "SLURM_"))}
    return variables | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}


@pytest.mark.long
def test_training_goes_on_while_a_checkpoint_is_written_and_the_checkpoint_has_the_state_of_its_step(
    text: str, tmp_path: Path
) -> None:
    steps = (*TINY, "--data", text, "--nproc", 2, "--train-iters", 12, "--save-interval", 4, "--keep", 3)
    plain, run = tmp_path / "plain", tmp_path / "run"
    Run(*steps, "--run", plain).done()
    err = Run(*steps, "--run", run, "--async-save", env=slow_disk(tmp_path / "site", 0.5)).done().err
    assert losses(run) == losses(plain)
    assert saved_steps(run) == [4, 8, 12]
    printed = [err.index(line) for line in ("step 5/12", "step 4/12  saved", "step 8/12  saved", "step 12/12  saved")]
    assert printed == sorted(printed)
    Run("--resume", run, "--step", 4, "--run", tmp_path / "more", "--train-iters", 12).done()
    assert losses(tmp_path / "more") == {step: loss for step, loss in losses(plain).items() if step > 4}
    assert read_manifest(run / "checkpoints" / "step-00000012").step == 12


@pytest.mark.long
def test_a_signal_waits_for_the_checkpoint_that_is_being_written(text: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    steps = (*TINY, "--data", text, "--train-iters", 400, "--save-interval", 3, "--keep", 9, "--run", run, "--async-save")
    start = Run(*steps, cold=True, env=slow_disk(tmp_path / "site", 1.0))
    start.wait_for_step(run, 4)
    start.process.terminate()
    start.done()
    assert saved_steps(run)[0] == 3
    assert saved_steps(run)[-1] == max(losses(run))
    assert not list((run / "checkpoints").glob(".step-*"))
