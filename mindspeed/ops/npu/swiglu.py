"""`swiglu` by ``npu_swiglu`` and ``npu_swiglu_backward``; fp64 and more than eight dimensions run the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from mindspeed.ops.npu import TYPES, filled
from mindspeed.ops.swiglu import _backward, _forward


def _supports(x: Tensor) -> bool:
    return x.dtype in TYPES and x.dim() <= 8 and filled(x)


def forward(x: Tensor, dim: int) -> Tensor:
    if not _supports(x):
        return _forward(x, dim)
    y: Tensor = torch.ops.npu.npu_swiglu(x, dim=dim)
    return y


def backward(dy: Tensor, x: Tensor, dim: int) -> Tensor:
    if not _supports(x):
        return _backward(dy, x, dim)
    dx: Tensor = torch.ops.npu.npu_swiglu_backward(dy, x, dim=dim)
    return dx


KERNELS: Final[dict[str, Callable[..., Any]]] = {"swiglu": forward, "swiglu_backward": backward}
