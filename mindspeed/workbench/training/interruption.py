"""The signals after which a run saves and ends, and how a save survives them. Light."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from mindspeed.engine.runtime.launch import heeded, leave_terminal
from mindspeed.problems import Problem, advice
from mindspeed.workbench.training.checkpoints import saved_steps

SAVING_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Ctrl-C, what schedulers send before they take a node away, a closed terminal."""


class StopRequest:
    """Detect whether a signal requests this process to stop; ranks agree on it before they act."""

    def __init__(self) -> None:
        self.is_made = False
        self._had_ctrl_c = False

    @contextmanager
    def heeding(self) -> Iterator[None]:
        """Only note `SAVING_SIGNALS` inside; afterwards they have their former handlers."""
        before = {number: signal.signal(number, self.handle) for number in heeded(SAVING_SIGNALS)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle(self, number: int, frame: Any) -> None:
        """Note a signal. A second Ctrl-C stops at once; other repeated signals change nothing."""
        if number == signal.SIGINT and self._had_ctrl_c:
            raise KeyboardInterrupt
        if number == signal.SIGHUP:
            leave_terminal()
        self._had_ctrl_c |= number == signal.SIGINT
        self.is_made = True


@contextmanager
def children_without(signals: Iterable[signal.Signals]) -> Iterator[None]:
    """Start processes inside that never receive these signals; this process receives them all the same.

    torchrun signals the whole process group of a rank. Megatron's writers return their results through a process that
    would end, and with it the save.
    """
    if sys.platform == "win32":
        yield
        return
    from multiprocessing.resource_tracker import ensure_running

    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    ensure_running()  # starting it unblocks signals
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ended_unsaved(run: str, number: int) -> Problem:
    """Return MS604 for a job that a signal ended before it had trained a step that it could save."""
    steps = saved_steps(run)
    before = f"the checkpoint of step {steps[-1]} is unchanged" if steps else "no checkpoint exists"
    fix = f"mindspeed pretrain --resume {run}" if steps else "start the job again"
    text = f"{signal.Signals(number).name} ended the job before its first step; nothing was saved, and {before}"
    return Problem("MS604", text, where=run, fix=advice(fix))
