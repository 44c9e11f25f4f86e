"""Autocast and gradient scaling for device cuda, served by those of the CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

_CUDA_DEFAULT = torch.float16


def enter_on_cpu(init: Callable[..., None]) -> Callable[..., None]:
    """``autocast.__init__``; without a dtype CUDA takes fp16, whereas the CPU would take bf16."""

    @wraps(init)
    def entered(self: Any, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or _CUDA_DEFAULT
        init(self, device_type, dtype, *args, **kwargs)

    return entered


def on_cpu(decorator: Callable[..., Any]) -> Callable[..., Any]:
    """``custom_fwd`` and ``custom_bwd``."""

    @wraps(decorator)
    def decorated(function: Any = None, *, device_type: str, **kwargs: Any) -> Any:
        return decorator(function, device_type="cpu" if device_type == "cuda" else device_type, **kwargs)

    return decorated


def ask_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """The four functions that read and write autocast's state; without a device type they mean cuda."""

    @wraps(function)
    def asked(*args: Any) -> Any:
        if not args or isinstance(args[0], bool):
            args = ("cpu", *args)
        elif args[0] == "cuda":
            args = ("cpu", *args[1:])
        return function(*args)

    return asked


def scale_on_cpu(init: Callable[..., None]) -> Callable[..., None]:
    """``GradScaler.__init__``."""

    @wraps(init)
    def scaled(self: Any, device: str = "cuda", *args: Any, **kwargs: Any) -> None:
        init(self, "cpu" if device == "cuda" else device, *args, **kwargs)

    return scaled
