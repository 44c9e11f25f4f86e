"""The NPU made active by torch_npu's ``transfer_to_npu``, which maps ``torch.cuda`` and nccl; importing this does it."""

from __future__ import annotations

from typing import Final

from mindspeed.problems import PlatformError, Problem, advice

try:
    import torch_npu
    from torch_npu.contrib import transfer_to_npu
except Exception as error:  # a missing package, a missing CANN library or a version that does not fit torch
    text = f"torch_npu cannot be imported: {type(error).__name__}: {error}"
    fix = "install the torch_npu that matches this torch, and source CANN's set_env.sh; or use --platform cpu"
    raise PlatformError([Problem("MS501", text, ("npu-platform",), fix=advice(fix))]) from error

__all__ = ["ACTIVE", "torch_npu", "transfer_to_npu"]

ACTIVE: Final = "npu"
