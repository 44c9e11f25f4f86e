"""`swiglu` on CUDA, along any dimension."""

from __future__ import annotations

from math import prod
from typing import Any, Final

from torch import Tensor

from mindspeed.ops.registration import Kernel
from mindspeed.ops.swiglu import _forward_shape
from mindspeed.ops.triton import swiglu as kernels
from mindspeed.ops.triton.launch import launch, pieces, takes, tile, warps


def _launch(kernel: Any, x: Tensor, dim: int, *tensors: Tensor) -> None:
    """Run ``kernel`` over ``x`` seen as [rows, 2, half]."""
    dim %= x.dim()
    rows, half = prod(x.shape[:dim]), prod(x.shape[dim:]) // 2
    if rows and half:
        tall, wide = tile(half, rows)
        programs = pieces(rows, tall) * pieces(half, wide)
        launch(kernel, programs, *tensors, rows, half, ROWS=tall, COLUMNS=wide, num_warps=warps(tall * wide))


def forward(x: Tensor, dim: int) -> Tensor:
    """The gated first half along ``dim``."""
    x, y = x.contiguous(), _forward_shape(x, dim)
    _launch(kernels.forward, x, dim, x, y)
    return y


def backward(dy: Tensor, x: Tensor, dim: int) -> Tensor:
    """The gradient of ``x``."""
    dy, x, dx = dy.contiguous(), x.contiguous(), x.new_empty(x.shape)
    _launch(kernels.backward, x, dim, dy, x, dx)
    return dx


KERNELS: Final[dict[str, Kernel]] = {
    "swiglu": Kernel(forward, lambda x, dim: takes(x)),
    "swiglu_backward": Kernel(backward, lambda dy, x, dim: takes(x, dy)),
}
