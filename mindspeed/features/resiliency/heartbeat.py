"""The heartbeat of a rank: the sections that its training loop is in, and when it entered or left one last. Light."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Final, Protocol

_RANKS: Final = 1 << 20
"""More ranks than a job has."""
_WORK: Final = ("forward", "backward")
"""Sections in which a rank computes. Waits for other pipeline stages and data-parallel replicas are outside of them."""


class SectionListener(Protocol):
    """A service to which sections are reported as well."""

    def enter(self, section: str) -> None: ...
    def leave(self, section: str) -> None: ...
    def stop(self) -> None: ...


class Heartbeat:
    """The progress of this rank. The training loop writes it, and a watch reads it from another thread."""

    def __init__(self) -> None:
        self.step = 0
        self.sections: list[str] = []
        self.since = time.monotonic()
        self.monitor: SectionListener | None = None
        self._working = 0.0

    def section(self, name: str) -> Section:
        """Return a context manager that encloses a section."""
        return Section(self, name)

    def add_work(self, seconds: float) -> None:
        """Count time that this rank spent on its micro-batches."""
        self._working += seconds

    def slowest_rank(self) -> dict[str, float]:
        """Return the rank that spent most time on its micro-batches since the last call, and this time; collective."""
        import torch
        import torch.distributed as dist

        working, self._working = self._working, 0.0
        if not dist.is_initialized():
            return {}
        if dist.get_world_size() == 1:
            return {"slowest_rank": 0, "slowest_seconds": working}
        number = int(working * 1e6) * _RANKS + dist.get_rank()
        largest = torch.tensor([number], dtype=torch.int64, device=torch.cuda.current_device())
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        microseconds, rank = divmod(int(largest.item()), _RANKS)
        return {"slowest_rank": rank, "slowest_seconds": microseconds / 1e6}


class Section:
    """A part of the training loop, in which the heartbeat shows it."""

    __slots__ = ("_begin", "_heartbeat", "_name")

    def __init__(self, heartbeat: Heartbeat, name: str) -> None:
        self._heartbeat, self._name = heartbeat, name

    def __enter__(self) -> None:
        heartbeat = self._heartbeat
        heartbeat.sections.append(self._name)
        self._begin = heartbeat.since = time.monotonic()
        if heartbeat.monitor is not None:
            heartbeat.monitor.enter(self._name)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        heartbeat = self._heartbeat
        heartbeat.since = time.monotonic()
        heartbeat.sections.pop()
        if self._name in _WORK and heartbeat.sections[:1] == ["step"]:
            heartbeat.add_work(heartbeat.since - self._begin)
        if heartbeat.monitor is not None:
            heartbeat.monitor.leave(self._name)
