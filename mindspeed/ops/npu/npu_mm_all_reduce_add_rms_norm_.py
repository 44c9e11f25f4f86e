"""`npu_mm_all_reduce_add_rms_norm_`: that file's ``npu_mm_all_reduce_base`` and ``npu_add_rms_norm``, copied in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from torch import Tensor

from mindspeed.ops.npu.npu_mm_all_reduce_add_rms_norm import forward


def in_place(x1: Tensor, x2: Tensor, residual: Tensor, *rest: Any) -> Tensor:
    y, norm = forward(x1, x2, residual, *rest)
    residual.copy_(y)
    return norm


KERNELS: Final[dict[str, Callable[..., Any]]] = {"npu_mm_all_reduce_add_rms_norm_": in_place}
