"""Count products as they run, and time steps. Plain torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from mindspeed.memory.recomputation import is_recomputing, watched_functions


class OperationCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count the operations of every product that this process runs, by the formulas registered with torch.

    ``executed`` counts all, ``recomputed`` those that repeat a part of a forward pass.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.executed = 0
        self.recomputed = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        formula: Callable[..., int] | None = flop_registry.get(func._overloadpacket)
        if formula is None:
            if func is not torch.ops.prim.device.default and not _has_kernel(func.name()):
                with self:
                    result = func.decompose(*args, **kwargs)
                if result is not NotImplemented:
                    return result
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        count = formula(*args, **kwargs, out_val=result)
        self.executed += count
        if is_recomputing():
            self.recomputed += count
        return result


@cache
def _has_kernel(operator: str) -> bool:
    """Return whether a device computes this operator itself: its decomposition may round in another way."""
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(operator, device) for device in ("CPU", "CUDA", "PrivateUse1"))


class StepMeter:
    """Count one step of ``interval`` on all ranks, and time every step of this rank.

    ``model`` are the operations of a step by the model's shape, None if they are not known; ``peak`` is in TFLOP/s.
    """

    def __init__(self, interval: int, model: int | None, peak: float | None = None) -> None:
        self.interval, self.model, self.peak = interval, model, peak
        self.executed = self.recomputed = self.seconds = 0.0

    @contextmanager
    def step(self, finished: int) -> Iterator[None]:
        """Count or time the step after ``finished`` ones. Counting slows a step down, so others give the time."""
        counter = OperationCounter() if not self.executed or finished % self.interval == 0 else None
        start = time.perf_counter()
        with ExitStack() as stack:
            if counter is not None:
                stack.enter_context(watched_functions())
                stack.enter_context(counter)
            yield
        torch.cuda.synchronize()
        if counter is None or not self.executed:
            self.seconds = time.perf_counter() - start
        if counter is not None:
            self.executed, self.recomputed = _over_ranks(counter.executed, counter.recomputed)

    def metrics(self) -> dict[str, float]:
        """Return the operations of the job and the speed of one rank."""
        counts = {"flops.hardware": self.executed, "flops.recomputed": self.recomputed}
        known = {"hardware": self.executed} | ({} if self.model is None else {"model": float(self.model)})
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        speeds = {name: count / (1e12 * self.seconds * ranks) for name, count in known.items()}
        shares = {}
        if self.peak is not None:
            names = {"model": "mfu", "hardware": "hfu"}
            shares = {f"tflops.{names[name]}": speed / self.peak for name, speed in speeds.items()}
        model = {} if self.model is None else {"flops.model": float(self.model)}
        return model | counts | {f"tflops.{name}": speed for name, speed in speeds.items()} | shares


def _over_ranks(*counts: int) -> tuple[float, ...]:
    """Sum counts over all ranks, exactly."""
    if not dist.is_initialized():
        return tuple(map(float, counts))
    total = torch.tensor(counts, dtype=torch.int64, device=torch.cuda.current_device())
    dist.all_reduce(total)
    return tuple(map(float, total.tolist()))
