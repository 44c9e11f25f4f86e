"""The source of contents that are in host memory, in page-locked buffers that are used again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor, UntypedStorage

from mindspeed.memory import transfers
from mindspeed.memory.parked import Source
from mindspeed.memory.transfers import CopiesInFlight
from mindspeed.platforms import runtime

TO_HOST = "to host"
TO_DEVICE = "to device"


class HostBuffers:
    """Buffers on the host, page-locked where the device is another one, kept by size for the next use."""

    def __init__(self) -> None:
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)

    def take(self, size: int) -> Tensor:
        """Return a buffer of ``size`` bytes."""
        free = self._free[size]
        return free.pop() if free else host_tensor((size,), torch.uint8)

    def give_back(self, buffer: Tensor) -> None:
        """Take a buffer back whose transfers have been waited for."""
        self._free[buffer.numel()].append(buffer)


class OnHost(Source):
    """A copy of storages on the host. The copy begins at once; the storages must not be written until it has settled."""

    def __init__(self, storages: Sequence[UntypedStorage], buffers: HostBuffers) -> None:
        self._pool = buffers
        self._buffers = [buffers.take(storage.nbytes()) for storage in storages]
        pairs = [(bytes_of(storage), buffer) for storage, buffer in zip(storages, self._buffers, strict=True)]
        self._transfer: CopiesInFlight = transfers.transfer(pairs, TO_HOST)

    def settle(self) -> None:
        self._transfer.wait()

    def start(self, storages: Sequence[UntypedStorage]) -> None:
        pairs = [(buffer, bytes_of(storage)) for storage, buffer in zip(storages, self._buffers, strict=True)]
        self._transfer = transfers.transfer(pairs, TO_DEVICE)

    def give(self, storages: Sequence[UntypedStorage]) -> None:
        self._transfer.wait()

    def release(self) -> None:
        self._transfer.wait()
        for buffer in self._buffers:
            self._pool.give_back(buffer)


def bytes_of(storage: UntypedStorage) -> Tensor:
    """Return a storage as a tensor of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def host_tensor(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Make a tensor on the host, page-locked where the device is another one."""
    return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=runtime.platform() != "cpu")
