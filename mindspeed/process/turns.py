"""Two computations on two threads, of which one runs at a time: each hands over where it would wait.

What one of them waits for, such as a transfer between ranks, goes on while the other one computes. The order of the turns
depends on the two computations alone, so that ranks which compute the same take the same turns.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, Protocol, TypeVar

_First = TypeVar("_First")
_Second = TypeVar("_Second")
_Result = TypeVar("_Result")


class State(Protocol):
    """A state of the process that each computation has for itself, such as that of a random number generator."""

    def get(self) -> Any:
        """Read it."""

    def set(self, value: Any, /) -> object:
        """Write it."""


class _OtherFailedError(BaseException):
    """The other computation has raised: this one ends where it has handed over."""


class _Turns:
    """A pair of computations, 0 and 1: whose turn it is, and what each had in the states when it handed over."""

    def __init__(self, states: Sequence[State]) -> None:
        self._states = states
        self._gates = threading.Semaphore(0), threading.Semaphore(1)
        self._running = [True, True]
        self._failed = False
        self._turn = 1
        self._kept = [[state.get() for state in states] for _ in range(2)]

    def run(self, own: int, computation: Callable[[], _Result]) -> _Result:
        """Run a computation when it is its turn. Raises where the other one has failed."""
        try:
            self._await(own)
            return computation()
        except BaseException:
            self._failed = True
            raise
        finally:
            self._running[own] = False
            self._pass_on()

    def hand_over(self) -> None:
        """Let the other computation run until it hands over or ends."""
        own = self._turn
        if self._running[1 - own]:
            self._pass_on()
            self._await(own)

    def end(self) -> None:
        """Leave the states as the first computation left them."""
        self._write(0)

    def _await(self, own: int) -> None:
        self._gates[own].acquire()
        if self._failed:
            raise _OtherFailedError

    def _pass_on(self) -> None:
        own, other = self._turn, 1 - self._turn
        self._kept[own] = [state.get() for state in self._states]
        self._write(other)
        self._turn = other
        self._gates[other].release()

    def _write(self, own: int) -> None:
        for state, value in zip(self._states, self._kept[own], strict=True):
            state.set(value)


_current: _Turns | None = None


_thread = ThreadPoolExecutor(1, "second-of-a-pair")


def _forked() -> None:
    """Let a forked process, which has no thread but its own, start one."""
    global _thread
    _thread = ThreadPoolExecutor(1, "second-of-a-pair")


os.register_at_fork(after_in_child=_forked)


def hand_over() -> None:
    """Let the other computation run until it hands over or ends; without one, return at once."""
    if _current is not None:
        _current.hand_over()


def in_turns(
    first: Callable[[], _First], second: Callable[[], _Second], states: Sequence[State] = ()
) -> tuple[_First, _Second]:
    """Run two computations, and return what both return. ``second``, on a separate thread, begins.

    Each sees ``states`` as if it ran alone; what the first leaves in them stays. What one raises ends the other where it has
    handed over, and is raised here.
    """
    global _current
    if _current is not None:
        raise RuntimeError("two computations take turns already")
    turns = _current = _Turns(states)
    beside = _thread.submit(turns.run, 1, second)
    try:
        made = turns.run(0, first)
    except _OtherFailedError:
        beside.result()
        raise
    else:
        return made, beside.result()
    finally:
        wait([beside])
        _current = None
        turns.end()
