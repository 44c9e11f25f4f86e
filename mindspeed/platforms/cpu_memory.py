"""Device memory statistics on the CPU: the resident set of this process, its high-water mark from the kernel.

All sizes are bytes. Each function stands for the one of the same name in ``torch.cuda.memory``.
"""

from __future__ import annotations

import os
import resource
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


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
    """Free and total memory of the host."""
    page = os.sysconf("SC_PAGE_SIZE")
    return page * os.sysconf("SC_AVPHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES")


def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    return f"resident set {memory_allocated() >> 20} MiB, peak {max_memory_allocated() >> 20} MiB"


def set_per_process_memory_fraction(fraction: float, device: Any = None) -> None:
    """The operating system limits memory on the CPU."""


def _resident(field: str) -> int:
    if _STATUS.exists():
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(field))
        return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
