"""Autocast and gradient scaling for device cuda, served by those of the CPU."""

from __future__ import annotations

from typing import Any

import torch

from mindspeed.plugins.patches import Function, wrapper


@wrapper
def enter_on_cpu(init: Function, self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
    """``autocast.__init__``; without a dtype CUDA takes fp16, whereas the CPU would take bf16."""
    if device_type == "cuda":
        device_type, dtype = "cpu", dtype or torch.float16
    init(self, device_type, dtype, *args, **kwargs)


@wrapper
def on_cpu(decorator: Function, function: Any = None, *, device_type: str, **kwargs: Any) -> Any:
    """``custom_fwd`` and ``custom_bwd``."""
    return decorator(function, device_type="cpu" if device_type == "cuda" else device_type, **kwargs)


@wrapper
def ask_cpu(function: Function, *args: Any) -> Any:
    """Read or write autocast's state; without a device type the four functions mean cuda."""
    if not args or isinstance(args[0], bool):
        args = ("cpu", *args)
    elif args[0] == "cuda":
        args = ("cpu", *args[1:])
    return function(*args)


@wrapper
def scale_on_cpu(init: Function, self: Any, device: str = "cuda", *args: Any, **kwargs: Any) -> None:
    """``GradScaler.__init__``."""
    init(self, "cpu" if device == "cuda" else device, *args, **kwargs)
