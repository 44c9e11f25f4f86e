"""``sys.excepthook`` of a process with a plan: problems as text, printed by one rank, in place of a traceback."""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from traceback import extract_tb
from types import TracebackType
from typing import Any, Final

from mindspeed.engine.runtime import rendezvous, session
from mindspeed.problems import Fix, MindSpeedError, Problem
from mindspeed.process.error_file import leave_problems
from mindspeed.process.providers import provider_of
from mindspeed.process.run import name_ranks, run_folder
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
    fix = Fix.advise(f"report it with the traceback in {kept}" if kept else f"report it; {again}")
    return Problem("MS901", f"{type(error).__name__}: {error}"[:500], where=where, fix=fix)


def _missing(package: str) -> Problem:
    name = _PIP_NAMES.get(package, package)
    wanted = f"'mindspeed[{_EXTRAS[package]}]'" if package in _EXTRAS else name
    text = f"{name} is not installed, but this command needs it"
    return Problem("MS501", text, fix=Fix.run_command(f"pip install {wanted}"))


def _author(error: BaseException) -> str:
    """Return the distribution of the innermost code of a feature, else of mindspeed."""
    trace, author = error.__traceback__, ""
    while trace is not None:
        author = provider_of(trace.tb_frame.f_globals.get("__name__", "")) or author
        trace = trace.tb_next
    return author


def _keep(error: BaseException) -> str:
    """Write a traceback into a file of its own, and return the name; '' where nothing can be written."""
    rank = f"rank{os.environ['RANK']}-" if "RANK" in os.environ else ""
    with suppress(OSError):
        number, name = tempfile.mkstemp(".traceback.txt", f"mindspeed-{rank}", run_folder())
        with os.fdopen(number, "w", encoding="utf-8", errors="backslashreplace") as file:
            traceback.print_exception(error, file=file)
        return name
    return ""


_DOORS: Final = {
    *(("mindspeed", "registry", function) for function in ("plan", "activate", "activate_from_environment", "activate_child")),
    ("mindspeed", "megatron_adaptor", "adapt"),
}
"""Functions whose unforeseen errors are not those of the program that calls them."""
_CLOSING: Final = 0.2
"""Seconds in which the connection to a rank that ended closes after the error of a collective."""
_before: Callable[..., Any] | None = None


def install() -> None:
    """Show errors that end this process in our way. Does nothing where a hook that was installed since calls ours."""
    global _before
    if _before is None:
        _before, sys.excepthook = sys.excepthook, show


def uninstall() -> None:
    """Put the hook of before back, unless another one was installed since, which then calls ours."""
    global _before
    if _before is not None and sys.excepthook is show:
        sys.excepthook, _before = _before, None


def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Tell features of an uncaught error, print it, and publish it to the ranks that wait for this one."""
    with suppress(Exception):
        session.call("run_failed", error=error)
    if isinstance(error, Exception) and not isinstance(error, MindSpeedError) and _is_ours(trace):
        cause, error = error, MindSpeedError([unforeseen(error)])
        error.__cause__ = cause
    if isinstance(error, MindSpeedError):
        trace_error(error)
        print(rendezvous.text_of(error), file=sys.stderr, flush=True)
        with suppress(OSError):
            leave_problems(error)
    else:
        (_before or sys.__excepthook__)(kind, error, trace)
    if isinstance(error, Exception):
        if (lost := lost_peer(error)) is not None:
            print(lost, file=sys.stderr, flush=True)
        rendezvous.report_failure(error)


def lost_peer(error: BaseException) -> Problem | None:
    """Return MS604 where other ranks had ended when a collective raised an error, else None."""
    ranks = rendezvous.lost_ranks(_CLOSING) if isinstance(error, RuntimeError) and not isinstance(error, MindSpeedError) else []
    if not ranks:
        return None
    fix = Fix.advise(f"check the log of {name_ranks(ranks)}; after a SIGKILL, see the kernel log of the node")
    return Problem("MS604", f"{name_ranks(ranks)} ended without an error message before this rank failed", fix=fix)


def _is_ours(trace: TracebackType | None) -> bool:
    while trace is not None:
        code = trace.tb_frame
        if (*code.f_globals.get("__name__", "").split("."), code.f_code.co_name) in _DOORS:
            return True
        trace = trace.tb_next
    return False
