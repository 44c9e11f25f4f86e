"""Units of the queue of weight gradients on the host: at most two units are on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import UntypedStorage

from mindspeed.memory.on_host import HostBuffers, OnHost
from mindspeed.memory.parked import Parked
from mindspeed.pipeline.recomputation import Unit


class HostQueue:
    """Offloads and prefetches what units of the queue keep, overlapped with compute.

    ``storages_of(unit)`` are the storages of a unit, read by nobody else from the end of its backward pass to its W. Every call
    gets the units of the queue, the one whose W comes first in front, so that nothing but the order is decided there.
    """

    def __init__(self, buffers: HostBuffers, storages_of: Callable[[Unit], Sequence[UntypedStorage]]) -> None:
        self._buffers, self._storages_of = buffers, storages_of
        self._leaving: dict[Unit, Parked] = {}
        self._away: dict[Unit, Parked] = {}
        self._returning: dict[Unit, Parked] = {}
        self.peak = 0
        """The most units that were on the device at once."""
        self.bytes = 0
        """The bytes that went to the host."""

    def leave(self, units: Iterable[Unit]) -> None:
        """Begin to copy units to the host that are not on their way already."""
        for unit in units:
            if not any(unit in moving for moving in (self._leaving, self._away, self._returning)):
                storages = self._storages_of(unit)
                self._leaving[unit] = Parked(storages, OnHost(storages, self._buffers))
                self.bytes += sum(storage.nbytes() for storage in storages)

    def free(self) -> None:
        """Free what was copied."""
        for parked in self._leaving.values():
            parked.park()
        self._away |= self._leaving
        self._leaving.clear()

    def fetch_ahead(self, units: Sequence[Unit]) -> None:
        """Begin to bring back the first unit that is away, if at most one is on the device."""
        if self.count(units) < 2 and (unit := next((unit for unit in units if unit in self._away), None)) is not None:
            self._returning[unit] = self._away.pop(unit)
            self._returning[unit].post()

    def wait(self, unit: Unit) -> None:
        """Have a unit on the device."""
        for moving in (self._leaving, self._away, self._returning):
            if unit in moving:
                moving.pop(unit).wait()

    def count(self, units: Sequence[Unit]) -> int:
        """Return how many units of the queue are on the device."""
        count = sum(unit not in self._away for unit in units)
        self.peak = max(self.peak, count)
        return count
