"""`swiglu` by ``npu_swiglu`` and ``npu_swiglu_backward``; fp64 and more than eight dimensions run the reference."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from mindspeed.ops.npu import TYPES
from mindspeed.ops.numerics import filled
from mindspeed.ops.registration import Kernel


def _supports(x: Tensor) -> bool:
    return x.dtype in TYPES and x.dim() <= 8 and filled(x)


def forward(x: Tensor, dim: int) -> Tensor:
    y: Tensor = torch.ops.npu.npu_swiglu(x, dim=dim)
    return y


def backward(dy: Tensor, x: Tensor, dim: int) -> Tensor:
    dx: Tensor = torch.ops.npu.npu_swiglu_backward(dy, x, dim=dim)
    return dx


KERNELS: Final[dict[str, Kernel]] = {
    "swiglu": Kernel(forward, lambda x, dim: _supports(x)),
    "swiglu_backward": Kernel(backward, lambda dy, x, dim: _supports(x)),
}
