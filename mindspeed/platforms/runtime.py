"""The device as features see it: one interface on npu, cuda and cpu.

>>> from mindspeed.platforms import runtime
>>> buffer = torch.empty(1024, device=runtime.device())
>>> runtime.device_module().max_memory_allocated()
"""

from __future__ import annotations

from typing import Any, Final

import torch

from mindspeed import platforms
from mindspeed.platforms.collectives import traffic
from mindspeed.problems import PlatformError, Problem, advice

__all__ = ["backend", "device", "device_module", "platform", "take_device", "traffic"]

_BACKENDS: Final = {"npu": "hccl", "cuda": "nccl", "cpu": "gloo"}


def platform() -> str:
    """Name of the active platform; without a plan the one of this machine."""
    return platforms.ACTIVE or platforms.detect()


def device() -> torch.device:
    """The device that tensors of this process belong on."""
    name = platform()
    return torch.device("cpu") if name == "cpu" else torch.device(name, device_module().current_device())


def device_module() -> Any:
    """Streams, events, memory and synchronization of the device, by their names in ``torch.cuda``.

    Returns ``torch.npu`` or ``torch.cuda``, which cpu-platform serves as well; on the CPU without a plan ``torch.cpu``.
    """
    return torch.cuda if platforms.ACTIVE == "cpu" else getattr(torch, platform())


def take_device(rank_on_host: int) -> None:
    """Make the device of a rank the current one; ranks share devices where there are fewer.

    Raises PlatformError with MS501 where torch finds none.
    """
    module, name = device_module(), platform()
    if not (count := module.device_count()):
        fix = f"--platform cpu, or install a torch that is built for {name}"
        raise PlatformError([Problem("MS501", f"the platform is {name}, but torch finds no such device", fix=advice(fix))])
    module.set_device(rank_on_host % count)


def backend() -> str:
    """Collective backend: hccl, nccl or gloo."""
    return _BACKENDS[platform()]
