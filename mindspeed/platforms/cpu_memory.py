"""Device memory on the CPU: the resident set of this process, its high-water mark from the kernel, and its share of the host.

All sizes are bytes. Each function stands for the one of the same name in ``torch.cuda.memory``.
"""

from __future__ import annotations

import os
import resource
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any, Final

import torch

from mindspeed.platforms.cpu_device import device_count, host_memory

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
_ALLOCATOR: Final = "DefaultCPUAllocator"
"""Torch's name of its allocator in an error of missing memory."""

LIMIT: int | None = None
"""Bytes that this process may use, once `set_per_process_memory_fraction` was called."""


def memory_allocated(device: Any = None) -> int:
    """Resident set now."""
    return _resident("VmRSS")


def max_memory_allocated(device: Any = None) -> int:
    """Largest resident set since the last reset; since the start of the process where the kernel refuses resets."""
    return _resident("VmHWM")


def reset_peak_memory_stats(device: Any = None) -> None:
    try:
        _CLEAR.write_text(_RESET_PEAK)
    except OSError:
        # a kernel or container without clear_refs: the peak then counts from the start of the process
        return


device_memory_used = memory_allocated
memory_reserved = memory_allocated
max_memory_reserved = max_memory_allocated
reset_max_memory_allocated = reset_peak_memory_stats
reset_accumulated_memory_stats = reset_peak_memory_stats


def memory_stats(device: Any = None) -> dict[str, Any]:
    """CUDA's keys for bytes in use; every other key reads 0."""
    stats: dict[str, Any] = defaultdict(int)
    for pool in ("allocated_bytes", "reserved_bytes", "active_bytes"):
        stats[f"{pool}.all.current"] = memory_allocated()
        stats[f"{pool}.all.peak"] = max_memory_allocated()
    return stats


def empty_cache() -> None:
    """The C library gives freed memory back by itself."""


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Free and total memory of this process: of its share of the host, and no more than the host has free."""
    total = host_memory() // device_count()
    on_host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    return max(0, min(on_host, (LIMIT or total) - memory_allocated())), total


def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    return f"resident set {memory_allocated() >> 20} MiB, peak {max_memory_allocated() >> 20} MiB"


def set_per_process_memory_fraction(fraction: float, device: Any = None) -> None:
    """Limit this process to a fraction of its share: a device tensor that would pass it raises OutOfMemoryError.

    Tensors made by factories and moves are held to it, results of operators count from then on.
    """
    global LIMIT
    if not 0 <= fraction <= 1:
        raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
    LIMIT = int(fraction * mem_get_info()[1])


def hold_to_limit(tensor: torch.Tensor, used: int) -> torch.Tensor:
    """A device tensor that was made when ``used`` bytes were in use. Raises OutOfMemoryError beyond the limit."""
    size = tensor.numel() * tensor.element_size()
    if LIMIT is not None and used + size > LIMIT:
        raise torch.OutOfMemoryError(
            f"CPU out of memory: a tensor needs {size >> 20} MiB, but {used >> 20} of {LIMIT >> 20} MiB are in use; "
            "torch.cuda.set_per_process_memory_fraction sets the limit"
        )
    return tensor


def hold_copy_to_limit(tensor: torch.Tensor) -> None:
    """Check a tensor before it is copied to the device. Raises OutOfMemoryError beyond the limit."""
    if LIMIT is not None:
        hold_to_limit(tensor, memory_allocated())


def as_out_of_memory(error: RuntimeError) -> RuntimeError:
    """The error that CUDA would raise where torch's allocator found no memory; any other error as it is."""
    return torch.OutOfMemoryError(str(error)) if _ALLOCATOR in str(error) else error


def _snapshot(device: Any = None, augment_with_fx_traces: bool = False) -> dict[str, Any]:
    """The C library keeps no record of allocations."""
    return {"segments": [], "device_traces": [], "allocator_settings": {}}


def _record_memory_history(enabled: Any = "all", *args: Any, **kwargs: Any) -> None:
    """The C library keeps no record of allocations."""


def _resident(field: str) -> int:
    if _STATUS.exists():
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(field))
        return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
