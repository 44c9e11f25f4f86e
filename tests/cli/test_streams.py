"""Output that is closed, full or read no more, and packages that print while they are imported."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

MINDSPEED = str(Path(sys.executable).with_name("mindspeed"))
FULL = "MS603 the output cannot be written: No space left on device\n  fix: write it to a disk with free space\n"


def shell(command: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["sh", "-c", f"{MINDSPEED} {command}"], capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.guards(processes=True)
@pytest.mark.budget(20)
@pytest.mark.parametrize(
    ("command", "status", "told"),
    [
        ("features list >&-", 0, ""),
        ("explain MS201 --json >&-", 0, ""),
        ("features list > /dev/full", 1, FULL),
        ("explain MS201 --json > /dev/full", 1, FULL),
        ("features check nosuch 2>&-", 1, ""),
        ("features check nosuch 2> /dev/full", 1, ""),
    ],
)
def test_output_that_cannot_be_written_is_no_traceback(command: str, status: int, told: str) -> None:
    done = shell(command)
    assert (done.returncode, done.stderr) == (status, told)


@pytest.mark.parametrize(
    "words", [["features", "list"], ["features", "list", "--json"], ["features", "check", "nosuch", "--json"]]
)
def test_a_pipe_whose_reader_has_gone_ends_the_command_as_a_shell_expects(words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([MINDSPEED, *words], stdout=writer, stderr=subprocess.PIPE, check=False, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_what_a_package_prints_at_import_is_not_among_the_json(tmp_path: Path) -> None:
    (tmp_path / "noisy.py").write_text("print('hello from noisy')\nraise ImportError('no')\n")
    metadata = tmp_path / "noisy-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: noisy\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[mindspeed.features]\nnoisy = noisy:Noisy\n")
    variables = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [MINDSPEED, "features", "list", "--json"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False, timeout=60)
    assert "noisy" in json.dumps(json.loads(done.stdout))
    assert "hello from noisy" in done.stderr
