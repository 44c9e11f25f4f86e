"""``torch.cuda`` device functions on the CPU: every process has one device, whose number is its local rank.

Each function stands for the one of the same name in torch and takes the same arguments.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch

from mindspeed.plugins.patches import Function, wrapper

_CAPABILITY = (8, 0)
"""Compute capability, by which scripts choose bf16 (8 and above) or fp8 kernels (9 and above)."""

_CGROUP_LIMITS: Final = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
_CPUINFO: Final = Path("/proc/cpuinfo")
_THERMOMETER: Final = Path("/sys/class/thermal/thermal_zone0/temp")

_current = 0


def is_available() -> bool:
    return True


is_initialized = is_available


def init() -> None:
    """The CPU needs no initialisation."""


_lazy_init = init


def _lazy_call(callable: Callable[[], Any], **kwargs: Any) -> None:
    callable()


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True


def is_tf32_supported() -> bool:
    return False


def is_current_stream_capturing() -> bool:
    return False


def current_device() -> int:
    return _current


def set_device(device: Any) -> None:
    global _current
    index = _index(device)
    if index >= 0:
        _current = index


def device_count() -> int:
    """Count one device per process of this host: the launcher's LOCAL_WORLD_SIZE, and at least every device that was set."""
    size = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or "1"
    return max(int(size), _current + 1)


def current_accelerator(check_available: bool = False) -> None:
    """Return None: code that looks for any accelerator finds the same as in a torch without CUDA."""


def get_device_name(device: Any = None) -> str:
    return f"CPU {platform.machine()}"


def get_device_capability(device: Any = None) -> tuple[int, int]:
    return _CAPABILITY


@dataclass(frozen=True)
class DeviceProperties:
    """The fields of CUDA's device properties that scripts read; memory in bytes, the share of one process."""

    name: str = field(default_factory=get_device_name)
    major: int = _CAPABILITY[0]
    minor: int = _CAPABILITY[1]
    total_memory: int = field(default_factory=lambda: host_memory() // device_count())
    multi_processor_count: int = field(default_factory=lambda: os.cpu_count() or 1)
    warp_size: int = 1
    gcnArchName: str = field(default_factory=platform.machine)  # noqa: N815 - torch's compiler keys its cache with it


def get_device_properties(device: Any = None) -> DeviceProperties:
    return DeviceProperties()


def host_memory() -> int:
    """Bytes that this host, or the container that this process is in, has in all."""
    limits = (path.read_text().strip() for path in _CGROUP_LIMITS if path.is_file())
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *(int(x) for x in limits if x.isdigit())])


def utilization(device: Any = None) -> int:
    """Percent of the cores that are at work, from the load of the last minute."""
    return min(100, round(100 * os.getloadavg()[0] / (os.cpu_count() or 1)))


def clock_rate(device: Any = None) -> int:
    """MHz of the first core; 0 where the kernel does not say it."""
    lines = _CPUINFO.read_text().splitlines() if _CPUINFO.is_file() else []
    return next((int(float(line.partition(":")[2])) for line in lines if line.startswith("cpu MHz")), 0)


def temperature(device: Any = None) -> int:
    """Degrees Celsius of the first sensor; 0 where there is none."""
    return int(_THERMOMETER.read_text()) // 1000 if _THERMOMETER.is_file() else 0


def power_draw(device: Any = None) -> int:
    """Milliwatts: 0, for they are not measured."""
    return 0


_RUNTIME: Final = SimpleNamespace(cudaProfilerStart=lambda: 0, cudaProfilerStop=lambda: 0, cudaError=SimpleNamespace(success=0))


def cudart() -> Any:
    """The calls of CUDA's runtime that profilers make; each succeeds and does nothing."""
    return _RUNTIME


def check_error(res: int) -> None:
    """Raise RuntimeError for a result that is not success."""
    if res != _RUNTIME.cudaError.success:
        raise RuntimeError(f"CUDA error {res}")


def can_device_access_peer(device: Any, peer_device: Any) -> bool:
    return True


def get_arch_list() -> list[str]:
    return []


@wrapper
def refuse_cuda_sources(load: Function, *args: Any, **kwargs: Any) -> Any:
    """``load_inline``: raise RuntimeError for CUDA sources, as a torch without CUDA does; one with it needs a device."""
    if kwargs.get("with_cuda"):
        raise RuntimeError("no device is available to compile CUDA sources for")
    return load(*args, **kwargs)


def synchronize(device: Any = None) -> None:
    """Everything has already run."""


def ipc_collect() -> None:
    """There is no device memory to collect."""


class device:  # noqa: N801 - stands for torch.cuda.device
    """Context manager that makes ``device`` the current one."""

    def __init__(self, device: Any) -> None:
        self.idx = _index(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = current_device()
        set_device(self.idx)

    def __exit__(self, *error: object) -> None:
        set_device(self.prev_idx)


def _index(device: Any) -> int:
    """Number of a device given as int, string, torch.device or None; -1 means the current one."""
    if device is None:
        return -1
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return -1 if index is None else index
