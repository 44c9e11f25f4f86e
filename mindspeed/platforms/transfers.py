"""Copies between device and host that run beside the computation, on every platform."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from mindspeed.platforms import runtime
from mindspeed.platforms.emulation import collective_log
from mindspeed.platforms.emulation.poison import fill

DELAY: float = 0.0
"""Seconds that a copy takes at least on the CPU. Set by the plan."""

POISON: bool = False
"""Whether targets are NaN until their copy is waited for. Set by the plan."""

Pairs = Sequence[tuple[Tensor, Tensor]]
_streams: Final[dict[str, Any]] = {}


class CopiesInFlight(Protocol):
    """Copies in flight: neither side may be written, and the targets not be read, before `wait`."""

    def wait(self) -> None:
        """Let what follows on the current stream see the copies. Later calls change nothing."""


def transfer(pairs: Pairs, kind: str) -> CopiesInFlight:
    """Copy each source to its target beside the computation; ``kind`` is the name of the transfer in the launch/wait log.

    A source holds what has been computed on the current stream so far. Host tensors are page-locked.
    """
    if POISON:
        with _disable_current_modes():
            for _, target in pairs:
                fill(target)
    copies: CopiesInFlight = _LateCopies(pairs) if runtime.platform() == "cpu" else _StreamCopies(pairs, kind)
    if collective_log.PATH is None:
        return copies
    return _LoggedTransfer(copies, kind, sum(source.nbytes for source, _ in pairs))


class _StreamCopies:
    """Copies on a side stream, one for each kind of transfer."""

    def __init__(self, pairs: Pairs, kind: str) -> None:
        self._device: Any = runtime.device_module()
        stream = _streams.get(kind)
        if stream is None:
            stream = _streams[kind] = self._device.Stream()
        stream.wait_stream(self._device.current_stream())
        with self._device.stream(stream):
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
        self._ended = stream.record_event()

    def wait(self) -> None:
        self._device.current_stream().wait_event(self._ended)


class _LateCopies:
    """Copies of the CPU, made when they are waited for: a missing wait is seen, and a delay costs no thread."""

    def __init__(self, pairs: Pairs) -> None:
        self._pairs: Pairs = pairs
        self._ended = time.perf_counter() + DELAY

    def wait(self) -> None:
        pairs, self._pairs = self._pairs, ()
        if pairs and (left := self._ended - time.perf_counter()) > 0:
            time.sleep(left)
        with torch.no_grad():
            for source, target in pairs:
                target.copy_(source)


class _LoggedTransfer:
    def __init__(self, copies: CopiesInFlight, kind: str, size: int) -> None:
        self._copies: CopiesInFlight | None = copies
        self._id = collective_log.log_launch(kind, "host", size)

    def wait(self) -> None:
        copies, self._copies = self._copies, None
        if copies is not None:
            before = time.perf_counter()
            copies.wait()
            collective_log.log_wait(self._id, time.perf_counter() - before)
