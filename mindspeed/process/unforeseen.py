"""The problem of an error that no code foresaw: a missing package, or a defect, whose traceback is kept in a file. Light."""

from __future__ import annotations

import os
import tempfile
import traceback
from contextlib import suppress
from traceback import extract_tb
from typing import Final

from mindspeed.problems.fixes import Advice, RunCommand
from mindspeed.problems.problem import Problem
from mindspeed.process.providers import provider_of
from mindspeed.process.tracing import TRACE_VARIABLE, trace_error, tracing

_EXTRAS: Final = {"torch": "train", "numpy": "train", "megatron": "train", "regex": "megatron-lm", "torch_npu": "npu"}
"""The extra of mindspeed that has a package."""
_PIP_NAMES: Final = {"yaml": "PyYAML"}


def unforeseen(error: BaseException) -> Problem:
    """MS501 for a package that is missing, else MS901, whose traceback is printed when tracing, or else in a file."""
    trace_error(error)
    if isinstance(error, ModuleNotFoundError) and (missing := (error.name or "").partition(".")[0]) not in ("", "mindspeed"):
        return _missing(missing)
    frames = [frame for frame in extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    line = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    where = ", ".join(filter(None, (_author(error), line)))
    kept = "" if tracing() else _keep(error)
    again = f"{TRACE_VARIABLE}=1 before the command shows the traceback"
    fix = Advice(f"report it with the traceback in {kept}" if kept else f"report it; {again}")
    return Problem("MS901", f"{type(error).__name__}: {error}"[:500], where=where, fix=fix)


def _missing(package: str) -> Problem:
    name = _PIP_NAMES.get(package, package)
    wanted = f"'mindspeed[{_EXTRAS[package]}]'" if package in _EXTRAS else name
    text = f"{name} is not installed, but this command needs it"
    return Problem("MS501", text, fix=RunCommand(f"pip install {wanted}"))


def _author(error: BaseException) -> str:
    """Return the distribution of the innermost code of a feature, else of mindspeed."""
    trace, author = error.__traceback__, ""
    while trace is not None:
        author = provider_of(trace.tb_frame.f_globals.get("__name__", "")) or author
        trace = trace.tb_next
    return author


def _keep(error: BaseException) -> str:
    """Write a traceback into a file of its own, and return the name; '' where nothing can be written."""
    with suppress(OSError):
        number, name = tempfile.mkstemp(prefix="mindspeed-", suffix=".traceback.txt")
        with os.fdopen(number, "w", encoding="utf-8", errors="backslashreplace") as file:
            traceback.print_exception(error, file=file)
        return name
    return ""
