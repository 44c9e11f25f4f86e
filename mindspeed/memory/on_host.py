"""The source of contents that are in host memory, in page-locked buffers that are used again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, UntypedStorage

from mindspeed.memory import transfers
from mindspeed.memory.parked import Source
from mindspeed.memory.transfers import CopiesInFlight
from mindspeed.platforms.host_copy import host_tensor

TO_HOST = "to host"
TO_DEVICE = "to device"


class HostBuffers:
    """Buffers on the host, page-locked where the device is another one, kept for the next use.

    At most twice the bytes that were in use at a time are held. Beyond that, sizes that were not used for longest are freed.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = {}
        self._in_use = self._most = self._unused = 0

    @property
    def held(self) -> int:
        """The bytes of all buffers."""
        return self._in_use + self._unused

    def take(self, size: int) -> Tensor:
        """Return a buffer of ``size`` bytes, or of up to a quarter more where one is free."""
        fitting = [other for other in self._free if size <= other <= size + size // 4]
        buffer = self._pop(min(fitting)) if fitting else host_tensor((size,), torch.uint8)
        self._in_use += buffer.numel()
        self._most = max(self._most, self._in_use)
        return buffer

    def give_back(self, buffer: Tensor) -> None:
        """Take a buffer back whose transfers have been waited for."""
        size = buffer.numel()
        self._free[size] = [*self._free.pop(size, []), buffer]
        self._in_use -= size
        self._unused += size
        while self.held > 2 * self._most:
            self._pop(next(iter(self._free)))

    def _pop(self, size: int) -> Tensor:
        buffer = self._free[size].pop()
        if not self._free[size]:
            del self._free[size]
        self._unused -= size
        return buffer


class OnHost(Source):
    """A copy of storages on the host. The copy begins at once; the storages must not be written until it has settled."""

    def __init__(self, storages: Sequence[UntypedStorage], buffers: HostBuffers) -> None:
        self._pool = buffers
        self._buffers = [buffers.take(storage.nbytes()) for storage in storages]
        pairs = [(storage, buffer) for buffer, storage in self._pairs(storages)]
        self._transfer: CopiesInFlight = transfers.transfer(pairs, TO_HOST)

    def settle(self) -> None:
        self._transfer.wait()

    def start(self, storages: Sequence[UntypedStorage]) -> None:
        self._transfer = transfers.transfer(self._pairs(storages), TO_DEVICE)

    def give(self, storages: Sequence[UntypedStorage]) -> None:
        self._transfer.wait()

    def release(self) -> None:
        self._transfer.wait()
        for buffer in self._buffers:
            self._pool.give_back(buffer)

    def _pairs(self, storages: Sequence[UntypedStorage]) -> list[tuple[Tensor, Tensor]]:
        """The used part of each buffer with the bytes of its storage."""
        return [
            (buffer[: storage.nbytes()], bytes_of(storage)) for storage, buffer in zip(storages, self._buffers, strict=True)
        ]


def bytes_of(storage: UntypedStorage) -> Tensor:
    """Return a storage as a tensor of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
