"""Compile Megatron's data helpers for the Python that runs, whatever the first one on PATH is."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

from megatron.core.datasets import utils

from mindspeed.plugins.patches import Function, wrapper
from mindspeed.problems import Fix, Problem, RunError


@wrapper
def compile_for_this_python(original: Function) -> None:
    """``compile_helpers``: run Megatron's Makefile with this interpreter; compiled helpers of a wheel are used.

    Raises RunError with MS502 and the compiler's words.
    """
    folder, suffix = Path(utils.__file__).parent, sysconfig.get_config_var("EXT_SUFFIX")
    if not (folder / "Makefile").is_file() and (folder / f"helpers_cpp{suffix}").is_file():
        return
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    command = ["make", "-C", str(folder), f"LIBEXT={suffix}"]
    done = subprocess.run(command, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False)
    if done.returncode:
        text = f"Megatron's data helpers cannot be compiled: {' '.join(done.stderr.split()[-30:])}"
        fix = Fix.advise(
            f"install make, a C++ compiler and pybind11 for {sys.executable}: {sys.executable} -m pip install pybind11"
        )
        raise RunError([Problem("MS502", text, where=str(folder), fix=fix)])
