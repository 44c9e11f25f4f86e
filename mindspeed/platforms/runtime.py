"""The device as features see it: one interface on npu, cuda and cpu.

>>> from mindspeed.platforms import runtime
>>> buffer = torch.empty(1024, device=runtime.device())
>>> runtime.peak_memory()
"""

from __future__ import annotations

from typing import Any

import torch

from mindspeed import platforms
from mindspeed.platforms.collectives import Count, Traffic, traffic
from mindspeed.plugins.problems import PlatformError, Problem

__all__ = [
    "Count",
    "Traffic",
    "backend",
    "current_stream",
    "device",
    "device_type",
    "free_cache",
    "memory_used",
    "new_event",
    "new_stream",
    "peak_memory",
    "platform",
    "reset_peak_memory",
    "stream",
    "synchronize",
    "take_device",
    "traffic",
]

_BACKENDS = {"npu": "hccl", "cuda": "nccl", "cpu": "gloo"}


def platform() -> str:
    """Name of the active platform; without a plan the one of this machine."""
    return platforms.ACTIVE or platforms.detect()


def device_type() -> str:
    """The type that tensors of this platform have: npu, cuda or cpu."""
    return platform()


def device() -> torch.device:
    """The device that tensors of this process belong on."""
    name = platform()
    return torch.device("cpu") if name == "cpu" else torch.device(name, _module().current_device())


def take_device(rank_on_host: int) -> None:
    """Make the device of a rank the current one; ranks share devices where there are fewer.

    Raises PlatformError with MS501 where torch finds none.
    """
    module, name = _module(), platform()
    if not (count := module.device_count()):
        fix = f"--platform cpu, or install a torch that is built for {name}"
        raise PlatformError([Problem("MS501", f"the platform is {name}, and torch finds no device of it", fix=fix)])
    module.set_device(rank_on_host % count)


def backend() -> str:
    """Collective backend: hccl, nccl or gloo."""
    return _BACKENDS[platform()]


def synchronize() -> None:
    """Wait for all work launched on the device."""
    _module().synchronize()


def memory_used() -> int:
    """Bytes in use: allocated on the device, or the resident set of this process on the CPU."""
    return int(_module().memory_allocated())


def peak_memory() -> int:
    """Largest `memory_used` since the last `reset_peak_memory`."""
    return int(_module().max_memory_allocated())


def reset_peak_memory() -> None:
    """Start a new peak at what is in use now."""
    _module().reset_peak_memory_stats()


def free_cache() -> None:
    """Give memory that the allocator only keeps back to the device."""
    _module().empty_cache()


def new_stream() -> Any:
    """A stream beside the current one; on the CPU its work runs in program order."""
    return _module().Stream()


def current_stream() -> Any:
    """The stream that work is launched on now."""
    return _module().current_stream()


def stream(stream: Any) -> Any:
    """Context manager that launches work on ``stream``."""
    return _module().stream(stream)


def new_event(timing: bool = False) -> Any:
    """An event; with ``timing`` two of them give milliseconds by ``start.elapsed_time(end)``."""
    return _module().Event(enable_timing=timing)


def _module() -> Any:
    """``torch.npu`` or ``torch.cuda``; on the CPU ``torch.cuda`` is the facade of cpu-platform, or its parts without a plan."""
    name = platform()
    if name == "npu":
        return torch.npu  # type: ignore[attr-defined]
    if name == "cuda" or platforms.ACTIVE == "cpu":
        return torch.cuda
    from mindspeed.platforms import cpu_facade

    return cpu_facade
