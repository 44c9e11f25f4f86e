"""Peak bytes of the device in a training step: the device's own count, on the CPU that of a meter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from mindspeed.memory import optimizer_windows
from mindspeed.memory.byte_count import Bytes
from mindspeed.memory.meter import Meter
from mindspeed.platforms import runtime


class StepMemory:
    """The peak of each step, from its forward pass to the update of the weights.

    The CPU has no count of its own: there the peak is what rests in weights, gradients and states, and what forward and
    backward make beside it, with what those of earlier steps have left, such as a mask that is made once.
    """

    def __init__(self, chunks: Iterable[Any]) -> None:
        self.optimizer: Any = None
        self._chunks = list(chunks)
        self._on_cpu = runtime.platform() == "cpu"
        self._peak: int | None = None
        self._begun = False
        self._meter: Meter | None = None
        self._earlier: list[Meter] = []

    def synchronize(self) -> None:
        """Wait for what the device computes, so that its events have times."""
        runtime.device_module().synchronize()

    def ended_step(self) -> int | None:
        """Return the peak of the step that ended, None before the first; a step begins."""
        if not self._on_cpu:
            device = runtime.device_module()
            self._peak = device.max_memory_allocated() if self._begun else None
            device.reset_peak_memory_stats()
        self._begun = True
        return self._peak

    def lap(self) -> tuple[int, int] | None:
        """Return the bytes now, and on the CPU the most since the last call; None there outside of `watched`.

        A device counts one peak, which is that of the step.
        """
        if not self._on_cpu:
            now = runtime.device_module().memory_allocated()
            return now, now
        if self._meter is None:
            return None
        other = self._other_bytes()
        return other + self._meter.live.device, other + self._meter.lap().device

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch the forward and backward passes of a step."""
        if not self._on_cpu:
            yield
            return
        with Meter() as meter:
            self._meter = meter
            yield
        self._meter = None
        self._peak = self._other_bytes() + meter.peak.device
        self._earlier = [known for known in (*self._earlier, meter) if known.live.device]

    def _other_bytes(self) -> int:
        """Return the bytes of what rests, and of what earlier steps have left."""
        return resting_bytes(self._chunks, self.optimizer) + sum(known.live.device for known in self._earlier)


def largest_of_ranks(values: Sequence[int], groups: Iterable[Any]) -> list[int]:
    """Return the largest of each value over the ranks of all groups."""
    numbers = torch.tensor(values, dtype=torch.int64, device=runtime.device())
    for group in groups:
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=group)
    return [int(number) for number in numbers.tolist()]


def resting_bytes(chunks: Iterable[Any], optimizer: Any) -> int:
    """Bytes of weights, gradients, main weights and optimizer states on the device."""
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    held = [tensor for p in parameters for tensor in (p, getattr(p, "main_grad", None), p.grad) if tensor is not None]
    storages: dict[int, int] = {(kept := tensor.untyped_storage())._cdata: kept.nbytes() for tensor in held}
    resting = optimizer_windows.resting_bytes(optimizer) if optimizer is not None else Bytes()
    return sum(storages.values()) + resting.device
