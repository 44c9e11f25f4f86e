"""Name the feature whose code runs for long, or ends the process, while features are imported, planned or activated."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final, NoReturn

from mindspeed.problems import Fix, Problem
from mindspeed.process.providers import provider_of

PATIENCE: Final = 10.0
"""Seconds after which running code is named."""
_LOOK: Final = 0.5
"""Seconds between two looks."""

RUNNING: Final[list[tuple[str, Any]]] = []
"""Code of features that runs now, the innermost last: a hook and its feature, or what it is and its function or class."""
_watched: list[int] = []


class ProcessEndError(RuntimeError):
    """Code of a feature called ``os._exit``, which would have ended the process without a word."""


@contextmanager
def running(what: str, code: Any) -> Iterator[None]:
    """Note that code of a feature runs: ``what`` it is for the reader, and a function or class of it."""
    RUNNING.append((what, code))
    try:
        yield
    finally:
        RUNNING.pop()


@contextmanager
def watched() -> Iterator[None]:
    """Print MS902 for code in `RUNNING` that takes longer than `PATIENCE`, and have its ``os._exit`` raise ProcessEndError.

    Inside another watch there is one already.
    """
    if _watched:
        yield
        return
    ended, thread = threading.Event(), threading.get_ident()
    end = os._exit
    _watched.append(thread)
    os._exit = _exit_of_features(end, os.getpid(), thread)  # type: ignore[assignment]
    watch = threading.Thread(target=_watch, args=(ended.wait, thread), name="mindspeed-watchdog", daemon=True)
    watch.start()
    try:
        yield
    finally:
        os._exit = end
        _watched.clear()
        ended.set()
        watch.join()


def is_watched() -> bool:
    """Return whether features are being imported, planned or activated."""
    return bool(_watched)


def _exit_of_features(end: Callable[[int], NoReturn], process: int, thread: int) -> Callable[[int], NoReturn]:
    def refuse(status: int) -> NoReturn:
        caller = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
        if RUNNING and (os.getpid(), threading.get_ident()) == (process, thread) and caller != "mindspeed":
            raise ProcessEndError(f"it called os._exit({status})")
        end(status)

    return refuse


def _watch(ended: Callable[[float], bool], thread: int) -> None:
    seen: tuple[str, Any] | None = None
    since, named = 0.0, False
    while not ended(_LOOK):
        now = RUNNING[-1] if RUNNING else None
        if now is not seen:
            seen, since, named = now, time.monotonic(), False
        elif now is not None and not named and time.monotonic() - since >= PATIENCE:
            named = True
            print(_slow(*now, sys._current_frames().get(thread)), file=sys.stderr, flush=True)


def _slow(what: str, code: Any, frame: FrameType | None) -> Problem:
    provider, name = provider_of(code), getattr(code, "__name__", "") if callable(code) and not isinstance(code, type) else ""
    spec = getattr(code, "spec", None)
    what = f"hook {what} of feature {spec.name}" if spec is not None else f"{what} {name}".strip()
    line = f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""
    where = ", ".join(filter(None, (provider, line)))
    fix = Fix.advise(f"wait; if it does not end, remove the feature, and report it to the authors of {provider or what}")
    return Problem("MS902", f"{what} is running for more than {PATIENCE:.0f} s", where=where, fix=fix)
