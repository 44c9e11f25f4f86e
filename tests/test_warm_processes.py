"""Processes of `tests.warm_processes` have the streams, the status and the end of those that Python starts."""

import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.warm_processes import warm_python

SLEEPER = "import os, pathlib, time; pathlib.Path(str(os.getpid())).touch(); time.sleep(60)"


def started(folder: Path, count: int, *words: str) -> tuple[subprocess.Popen[bytes], list[int]]:
    """Run a script that sleeps, and return its ``count`` processes."""
    script = folder / "script.py"
    script.write_text(SLEEPER)
    process = subprocess.Popen([*warm_python(), *words, str(script)], cwd=folder)
    while len(found := [int(path.name) for path in folder.iterdir() if path.name.isdigit()]) < count:
        assert process.poll() is None
        time.sleep(0.05)
    return process, found


def wait_for_the_end_of(*processes: int) -> None:
    end = time.monotonic() + 5
    while any(map(psutil.pid_exists, processes)):
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_script_reads_the_standard_input(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print(input()[::-1])")
    assert subprocess.run([*warm_python(), str(script)], input=b"abc", capture_output=True, check=True).stdout == b"cba\n"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_signal_is_the_status_and_ends_the_process(tmp_path: Path, number: signal.Signals) -> None:
    process, (forked,) = started(tmp_path, 1)
    process.send_signal(number)
    assert process.wait() == -number
    wait_for_the_end_of(forked)


def test_a_process_that_is_killed_ends_its_command(tmp_path: Path) -> None:
    process, (forked,) = started(tmp_path, 1)
    os.kill(forked, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


@pytest.mark.long
def test_ranks_end_with_their_launcher(tmp_path: Path) -> None:
    process, ranks = started(tmp_path, 2, "-m", "mindspeed", "run", "--platform", "cpu", "--nproc", "2", "--")
    process.kill()
    wait_for_the_end_of(*ranks)
