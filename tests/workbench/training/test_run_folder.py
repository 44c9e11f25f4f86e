"""One job at a time in a run folder, and what a full disk is called."""

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed.problems import Problem, RunError
from mindspeed.workbench.training.checkpoints import checkpoint_path
from mindspeed.workbench.training.run_folder import LOCK, check_free, disk_problem, hold_folder

HOLD = """
import sys, time
from filelock import FileLock
with FileLock(sys.argv[1]):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_folder_that_another_process_holds_is_refused_and_free_when_that_is_killed(tmp_path: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / LOCK)], stdout=subprocess.PIPE)
    assert other.stdout is not None
    other.stdout.readline()
    with pytest.raises(RunError) as caught:
        check_free(tmp_path)
    other.kill()
    other.communicate()
    assert str(caught.value) == (
        f"MS608 another job is running in {tmp_path}\n"
        f"  where: {tmp_path}\n"
        "  fix: wait until that job has ended, or give another --run FOLDER"
    )
    check_free(tmp_path)


def test_a_folder_is_free_again_after_its_job(tmp_path: Path) -> None:
    with hold_folder(tmp_path / "run"):
        pass
    with hold_folder(tmp_path / "run"):
        pass


def test_a_folder_below_a_file_cannot_be_made() -> None:
    with pytest.raises(RunError, match="MS603 the run folder /dev/null/x is not writable: Not a directory"):
        check_free("/dev/null/x")


def test_a_full_disk_behind_megatrons_own_error_is_named(tmp_path: Path) -> None:
    """Megatron's builder of data sets raises a bare Exception from the error of the file."""
    checkpoint_path(tmp_path, 20).mkdir(parents=True)
    wrapped = Exception("Failed to write dataset materials")
    wrapped.__cause__ = OSError(errno.ENOSPC, "No space left on device", "index/a.npy")
    assert str(disk_problem(wrapped, str(tmp_path))) == (
        "MS603 index/a.npy cannot be written: No space left on device\n"
        f"  where: {tmp_path}\n"
        f"  fix: free some space, then mindspeed pretrain --resume {tmp_path} (continues from step 20)"
    )


def test_other_errors_are_no_problem_of_the_disk(tmp_path: Path) -> None:
    assert disk_problem(OSError(errno.ENOENT, "No such file"), str(tmp_path)) is None
    known = RunError([Problem("MS603", "the checkpoint cannot be saved")])
    known.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    assert disk_problem(known, str(tmp_path)) is None
