"""Copies between device and host that take their time, are logged, and whose targets are poison until they are waited for."""

from __future__ import annotations

import time
from typing import Any

from torch.utils._python_dispatch import _disable_current_modes

from mindspeed.features.device_emulation.collective_log import LoggedWork
from mindspeed.features.device_emulation.link import DelayedWork
from mindspeed.features.device_emulation.poison import fill
from mindspeed.memory.transfers import Pairs
from mindspeed.plugins.patches import Function, wrapper

DELAY: float = 0.0
"""Seconds that a copy takes at least. Set by the plan."""


@wrapper
def delayed(transfer: Function, pairs: Pairs, kind: str) -> Any:
    """``transfer``: it is done some time after its launch at the earliest."""
    done_at = time.perf_counter() + DELAY
    return DelayedWork(transfer(pairs, kind), done_at)


@wrapper
def logged(transfer: Function, pairs: Pairs, kind: str) -> Any:
    """``transfer``: its launch and its wait are rows of the log."""
    copies = transfer(pairs, kind)
    return LoggedWork(copies, [{"kind": kind, "group": "host", "bytes": sum(source.nbytes for source, _ in pairs)}])


@wrapper
def poisoned(transfer: Function, pairs: Pairs, kind: str) -> Any:
    """``transfer``: its targets are poison until they are waited for."""
    with _disable_current_modes():
        for _, target in pairs:
            fill(target)
    return transfer(pairs, kind)
