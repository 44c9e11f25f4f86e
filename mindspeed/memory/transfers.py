"""Copies between device and host that overlap with compute, on every platform."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from mindspeed.platforms import runtime

Pairs = Sequence[tuple[Tensor, Tensor]]
_streams: Final[dict[str, Any]] = {}


class CopiesInFlight(Protocol):
    """Copies in flight: neither side may be written, and the targets not be read, before `wait`."""

    def wait(self) -> None:
        """Let what follows on the current stream see the copies. Later calls change nothing."""


def transfer(pairs: Pairs, kind: str) -> CopiesInFlight:
    """Copy each source to its target overlapped with compute; ``kind`` is the name of the transfer in the launch/wait log.

    A source holds what has been computed on the current stream so far. Host tensors are page-locked.
    """
    return _LateCopies(pairs) if runtime.platform() == "cpu" else _StreamCopies(pairs, kind)


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
    """Copies of the CPU, made when they are waited for: a missing wait is seen."""

    def __init__(self, pairs: Pairs) -> None:
        self._pairs: Pairs = pairs

    def wait(self) -> None:
        pairs, self._pairs = self._pairs, ()
        with torch.no_grad():
            for source, target in pairs:
                target.copy_(source)
