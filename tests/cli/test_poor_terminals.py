"""Output on a closed pipe, without UTF-8 and without colour: readable, and never a traceback."""

import os
import subprocess
import sys

import pytest

from mindspeed.cli.doctor import _lines
from mindspeed.workbench.diagnostics.finding import Finding

LIST = [sys.executable, "-c", "from mindspeed.cli import main; main()", "features", "list", "--wide"]


def test_a_closed_pipe_is_no_error_text():
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(LIST, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert done.stderr == ""


@pytest.mark.parametrize("variables", [{"LC_ALL": "C"}, {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}])
def test_output_without_utf_8_is_plain_ascii(variables):
    done = subprocess.run(LIST, capture_output=True, env={**os.environ, **variables, "NO_COLOR": "1"}, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.isascii()
    assert b"\x1b" not in done.stdout


def test_doctor_wraps_its_rows_on_a_terminal_of_20_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    finding = Finding("torch_npu", "not installed", "optional", "pip install torch_npu")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert list(_lines(finding)) == ["torch_npu", "  not installed", "  [optional]", "  fix: pip install", "    torch_npu"]
