"""Tensors on the host, and copies of small ones on a side stream: reading these waits for no work that was queued since."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from mindspeed.platforms import runtime
from mindspeed.platforms.cpu_host import mark_host

_streams: Final[list[Any]] = []
"""The side stream of this process, once a copy was posted."""


def host_tensor(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Make a tensor on the host, page-locked where the device is another one."""
    return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=runtime.platform() != "cpu")


class HostCopy:
    """A copy of a device tensor in host memory, posted after what has been computed on the current stream so far.

    A function in the place of the tensor waits for a collective and returns what it received; the side stream waits, not the
    current one. The CPU copies a tensor at once, and calls the function at the first `wait`. Without ``posted`` nothing is
    copied, and `wait` is not called.
    """

    def __init__(self, source: Tensor | Callable[[], Tensor], posted: bool = True) -> None:
        self._source: Tensor | Callable[[], Tensor] = source
        self._host: Tensor | None = None
        self._copied: Any = None
        if not posted:
            return
        if runtime.platform() != "cpu":
            self._post()
        elif isinstance(source, Tensor):
            self._host = mark_host(source.detach().clone())

    def _post(self) -> None:
        device = runtime.device_module()
        if not _streams:
            _streams.append(device.Stream())
        (side,) = _streams
        side.wait_stream(device.current_stream())
        with device.stream(side):
            source = self._received()
            self._host = host_tensor(source.shape, source.dtype)
            self._host.copy_(source.detach(), non_blocking=True)
            source.record_stream(side)
            self._copied = side.record_event()

    def _received(self) -> Tensor:
        if not isinstance(self._source, Tensor):
            self._source = self._source()
        return self._source

    def wait(self) -> Tensor:
        """Return the copy; the host waits for it."""
        if self._copied is not None:
            self._copied.synchronize()
        if self._host is None:
            self._host = self._received().to("cpu")
        return self._host

    def on_device(self) -> Tensor:
        """Return the tensor on the device; the current stream waits for it."""
        if self._copied is not None:
            runtime.device_module().current_stream().wait_event(self._copied)
        return self._received()
