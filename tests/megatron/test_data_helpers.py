"""Megatron's data helpers are compiled for the Python that runs."""

import sys
import sysconfig
from pathlib import Path

import pytest
from megatron.core.datasets import utils

from mindspeed.problems import MindSpeedError

pytestmark = pytest.mark.usefixtures("on_cpu")
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
MAKEFILE = "LIBEXT = .of-another-python.so\ndefault:\n\t@command -v python3 > helpers_cpp$(LIBEXT)\n"


@pytest.fixture
def datasets(tmp_path, monkeypatch):
    """A folder in the place of megatron/core/datasets, and another python3 first on PATH."""
    other = tmp_path / "bin" / "python3"
    other.parent.mkdir()
    other.write_text("#!/bin/sh\nexit 1\n")
    other.chmod(0o755)
    monkeypatch.setenv("PATH", f"{other.parent}:/usr/bin:/bin")
    monkeypatch.setattr(utils, "__file__", str(tmp_path / "utils.py"))
    return tmp_path


def test_make_gets_this_python_and_its_suffix(datasets):
    (datasets / "Makefile").write_text(MAKEFILE)
    utils.compile_helpers()
    (made,) = datasets.glob("helpers_cpp*")
    assert made.name == f"helpers_cpp{SUFFIX}"
    assert Path(made.read_text().strip()).parent == Path(sys.executable).parent


def test_what_a_wheel_brings_is_left_as_it_is(datasets):
    (datasets / f"helpers_cpp{SUFFIX}").write_text("")
    utils.compile_helpers()
    assert [path.name for path in datasets.glob("helpers_cpp*")] == [f"helpers_cpp{SUFFIX}"]


def test_what_the_compiler_says_is_a_problem(datasets):
    (datasets / "Makefile").write_text("default:\n\t@echo no pybind11 here >&2; exit 1\n")
    with pytest.raises(MindSpeedError, match="no pybind11 here") as caught:
        utils.compile_helpers()
    assert f"{sys.executable} -m pip install pybind11" in caught.value.problems[0].fix_text
