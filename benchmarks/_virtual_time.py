"""Time of a schedule without a clock: products and transfers take what their size says, whatever the machine does meanwhile.

A rank has one processor and one link. A product moves the time of the processor on, a transfer begins when the link is free and
ends after its bytes, and a wait moves the processor to that end. What it moves by is exposed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

PRODUCTS = ("aten.mm", "aten.addmm", "mindspeed.npu_gmm", "mindspeed.npu_gmm_sum")


class Event(NamedTuple):
    """A product, a transfer or a wait, from ``start`` to ``end``."""

    kind: str
    start: float
    end: float


@dataclass
class Schedule:
    """The timeline of a rank: ``flops`` multiplications, or ``bytes`` on the link, take one unit of time.

    With a ``delay`` every transfer takes that long, whatever its size and whatever else is on the link.
    """

    flops: float
    bytes: float
    delay: float = 0.0
    now: float = 0.0
    free: float = 0.0
    events: list[Event] = field(default_factory=list)

    def product(self, name: str, multiplications: int) -> None:
        self.events.append(Event(name, self.now, self.now + multiplications / self.flops))
        self.now = self.events[-1].end

    def transfer(self, name: str, sent: int) -> float:
        if self.delay:
            self.events.append(Event(name, self.now, self.now + self.delay))
            return self.events[-1].end
        start = max(self.now, self.free)
        self.free = start + sent / self.bytes
        self.events.append(Event(name, start, self.free))
        return self.free

    def wait(self, end: float) -> None:
        if end > self.now:
            self.events.append(Event("wait", self.now, end))
            self.now = end

    def total(self, kind: str) -> float:
        """Time of all events whose kind begins so."""
        return sum(event.end - event.start for event in self.events if event.kind.startswith(kind))

    @property
    def exposed(self) -> float:
        """Share of the time of transfers that the processor waits."""
        return self.total("wait") / max(self.total("transfer"), 1e-9)


class _Work:
    """The handle of a transfer, whose wait takes virtual time too."""

    def __init__(self, work: Any, schedule: Schedule, end: float) -> None:
        self._work, self._schedule, self._end = work, schedule, end

    def wait(self, *args: Any) -> Any:
        self._schedule.wait(self._end)
        return self._work.wait(*args)


class _Products(TorchDispatchMode):
    def __init__(self, schedule: Schedule) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._schedule = schedule

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = str(func).removesuffix(".default")
        if name in PRODUCTS and isinstance(out, torch.Tensor):
            x = args[1] if name == "aten.addmm" else args[0]
            columns = args[1].shape[1] if name.endswith("_sum") else out.shape[-1]
            self._schedule.product(name, x.numel() * columns)
        return out


@contextmanager
def virtual_time(flops: float, bytes: float, delay: float = 0.0) -> Iterator[Schedule]:
    """Record the schedule of what runs in the block."""
    schedule = Schedule(flops, bytes, delay)

    def timed(original: Callable[..., Any], source: int) -> Callable[..., Any]:
        def collective(*args: Any, async_op: bool = False, **kwargs: Any) -> Any:
            sent = args[source]
            size = dist.get_world_size(kwargs.get("group"))
            whole = sent.nbytes if original.__name__ != "all_gather_into_tensor" else sent.nbytes * size
            end = schedule.transfer(f"transfer {original.__name__}", whole * (size - 1) // size)
            work = original(*args, async_op=True, **kwargs)
            handle = _Work(work, schedule, end)
            return handle if async_op else handle.wait() and None

        return collective

    names = {"all_to_all_single": 1, "all_gather_into_tensor": 1, "reduce_scatter_tensor": 1}
    patches = [patch.object(dist, name, timed(getattr(dist, name), source)) for name, source in names.items()]
    with patches[0], patches[1], patches[2], _Products(schedule):
        yield schedule
