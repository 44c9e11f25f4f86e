"""`npu_mm_all_reduce_add_rms_norm_`: that file's ``npu_mm_all_reduce_base`` and ``npu_add_rms_norm``, copied in place."""

from __future__ import annotations

from typing import Any, Final

from torch import Tensor

from mindspeed.ops.npu.npu_mm_all_reduce_add_rms_norm import forward, supports
from mindspeed.ops.registration import Kernel


def in_place(x1: Tensor, x2: Tensor, residual: Tensor, *rest: Any) -> Tensor:
    y, norm = forward(x1, x2, residual, *rest)
    residual.copy_(y)
    return norm


KERNELS: Final[dict[str, Kernel]] = {"npu_mm_all_reduce_add_rms_norm_": Kernel(in_place, supports)}
