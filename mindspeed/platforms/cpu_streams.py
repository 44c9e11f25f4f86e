"""CUDA streams and events on the CPU, where work runs in program order: waiting has nothing to do."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from struct import Struct
from typing import Any, Final

import torch

_HANDLE: Final = Struct("d")


def _waited(self: Any, *other: Any, **named: Any) -> None:
    """Program order has waited already."""


class Event:
    """The time at which it was recorded."""

    wait = synchronize = _waited

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, **_: Any) -> None:
        self._recorded: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        self._recorded = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds from this event to ``end_event``. Raises RuntimeError unless both were recorded."""
        if self._recorded is None or end_event._recorded is None:
            raise RuntimeError("both events must be recorded before their elapsed time is read")
        return (end_event._recorded - self._recorded) * 1e3

    def ipc_handle(self) -> bytes:
        """Return the handle from which `from_ipc_handle` makes the same event in another process of this host."""
        return _HANDLE.pack(math.nan if self._recorded is None else self._recorded)

    @classmethod
    def from_ipc_handle(cls, device: Any, handle: bytes) -> Event:
        event = cls()
        (recorded,) = _HANDLE.unpack(handle)
        event._recorded = None if math.isnan(recorded) else recorded
        return event


class Stream:
    """A name for a sequence of work; its work runs at once, in program order."""

    wait_stream = wait_event = synchronize = _waited

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.priority = priority
        self.device = torch.device("cpu")
        self.device_index = 0
        self.device_type = 0
        self.stream_id = self.cuda_stream = 0

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Lowest and highest priority: there is but one."""
        return 0, 0

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    def __enter__(self) -> Stream:
        _entered.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        _entered.pop()


_default = Stream()
_entered = [_default]


def default_stream(device: Any = None) -> Stream:
    return _default


def current_stream(device: Any = None) -> Stream:
    return _entered[-1]


def set_stream(stream: Stream | None) -> None:
    if stream is not None:
        _entered[-1] = stream


class StreamContext:
    """Makes a stream the current one, as often as it is entered; None changes nothing."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self.stream.__enter__()

    def __exit__(self, *error: object) -> None:
        if self.stream is not None:
            self.stream.__exit__(*error)


def stream(stream: Stream | None) -> StreamContext:
    return StreamContext(stream)


def mark(msg: Any = None) -> int:
    """Return 0 as the depth, or the number, of marks and ranges, which no other code reads."""
    return 0


range_push = range_pop = range_start = range_end = mark


@contextmanager
def emit_nvtx(enabled: bool = True, record_shapes: bool = False) -> Iterator[None]:
    """Run operators that no tool annotates."""
    yield


@contextmanager
def range(msg: str, *args: Any, **kwargs: Any) -> Iterator[None]:
    yield
