"""What a machine does to a run: a disk that is full at any write, a clock that jumps."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed.workbench.training.checkpoints import saved_steps
from tests.workbench.training.conftest import Run, log, losses

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[3]
JUMPS = """
import itertools, time

real, calls = time.time, itertools.count()
time.time = lambda: real() + (-86_400, 0, 31_536_000)[next(calls) // 7 % 3]
"""
"""A clock that is a day behind, right, and a year ahead in turns, for Python."""


@pytest.mark.parametrize("how", [[], ["async"]], ids=["at once", "async"])
@pytest.mark.parametrize("every", [41, pytest.param(1, marks=pytest.mark.exhaustive("the row above has every 41st write"))])
def test_a_disk_that_is_full_from_any_write_of_a_save_on_loses_nothing(run: Path, every: int, how: list[str]) -> None:
    """A write of a save fails, with all that come after it; then an earlier or later one."""
    program = [sys.executable, str(Path(__file__).with_name("full_disk.py")), str(run), str(every), *how]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(program, env=variables, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["failed"] > 400 // every
    assert (result["lost"], result["steps"]) == ([], [2, 3])


def test_a_clock_that_jumps_changes_no_step_and_no_checkpoint(run: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(run, tmp_path / "other"))
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(JUMPS)
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("MINDSPEED_", "SLURM_"))}
    variables |= {"PYTHONPATH": f"{tmp_path / 'site'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    steps = ("--train-iters", 8, "--save-interval", 2, "--keep", 3, "--nproc", 2)
    Run("--resume", run, *steps).done()
    for last in (4, 8):
        Run("--resume", other, *steps[:1], last, *steps[2:], env=variables).done()
    assert losses(other) == losses(run)
    assert saved_steps(other) == saved_steps(run) == [4, 6, 8]
    assert all(row["seconds"] >= 0 for row in log(other) if "seconds" in row)
