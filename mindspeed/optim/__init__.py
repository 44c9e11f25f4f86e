"""Optimizers whose states or main weights use less device memory: wrappers of any torch optimizer, without a plan.

>>> optimizer = SwapOptimizer(torch.optim.AdamW(model.parameters(), lr=3e-4))
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from mindspeed.optim.windowed import ReuseFp32Param as ReuseFp32Param
    from mindspeed.optim.windowed import SwapOptimizer as SwapOptimizer

_NAMES: Final = ("ReuseFp32Param", "SwapOptimizer")


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.windowed"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_NAMES})
