"""`rms_norm` and `rms_norm_residual` on CUDA: one pass over a row that is held whole, two over a longer one."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from mindspeed.ops.registration import Kernel
from mindspeed.ops.triton import rms_norm as kernels
from mindspeed.ops.triton.launch import ROW, cores, launch, pieces, takes, warps, whole_rows
from mindspeed.ops.triton.sums import column_sums

_AHEAD: Final = 8192
"""Columns of the widest rows of which the next is read ahead: of wider ones the registers cannot hold two."""
_LONG: Final = 4096
"""Columns of the pieces in which a row longer than ROW is read."""


def residual_forward(x: Tensor, residual: Tensor | None, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    """``(y, sum, rstd)``; without a residual the sum is ``x``."""
    width = gamma.numel()
    x, gamma = x.contiguous(), gamma.contiguous()
    y, rows = x.new_empty(x.shape), x.numel() // width
    rstd = x.new_empty((*x.shape[: x.dim() - gamma.dim()], *(1 for _ in gamma.shape)), dtype=torch.float32)
    has = residual is not None
    residual = x if residual is None else residual.contiguous()
    total = x.new_empty(x.shape) if has else x
    tensors = (x, residual, gamma, y, total, rstd)
    if width > ROW:
        launch(kernels.forward_long, rows, *tensors, width, epsilon, RESIDUAL=has, COLUMNS=_LONG, num_warps=8)
    else:
        tall, wide = whole_rows(width, rows)
        sizes = {"ROWS": tall, "COLUMNS": wide, "num_warps": warps(tall * wide)}
        launch(kernels.forward, pieces(rows, tall), *tensors, rows, width, epsilon, RESIDUAL=has, **sizes)
    return y, total, rstd


def residual_backward(dy: Tensor, dtotal: Tensor | None, x: Tensor, gamma: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of x, which is also that of the residual, and the gradient of gamma; ``dtotal`` is None without one."""
    width = gamma.numel()
    dy, x, gamma, rstd = dy.contiguous(), x.contiguous(), gamma.contiguous(), rstd.contiguous()
    rows = x.numel() // width
    dx, dgamma = x.new_empty(x.shape), gamma.new_empty(gamma.shape)
    has = dtotal is not None
    tensors = (dy, x, gamma, rstd, dy if dtotal is None else dtotal.contiguous(), dx)
    if width > ROW:
        parts = _long(tensors, rows, width, has)
    else:
        tall, wide = whole_rows(width, rows)
        # the share of dgamma stays in registers: twice the warps of the forward pass, two programs on a multiprocessor
        sizes = {"AHEAD": wide <= _AHEAD, "ROWS": tall, "COLUMNS": wide, "num_warps": warps(2 * tall * wide)}
        programs = min(pieces(rows, tall), 2 * cores(x.device))
        parts = x.new_empty((programs, width), dtype=torch.float32)
        launch(kernels.backward, programs, *tensors, parts, rows, width, RESIDUAL=has, **sizes)
    launch(column_sums, pieces(width, 64), parts, dgamma, parts.shape[0], width, ROWS=32, COLUMNS=64)
    return dx, dgamma


def _long(tensors: tuple[Tensor, ...], rows: int, width: int, has: bool) -> Tensor:
    """Launch the gradient of rows longer than ROW; gives the shares of dgamma."""
    dy, x, _, rstd, _, _ = tensors
    launch(kernels.backward_long, rows, *tensors, width, RESIDUAL=has, COLUMNS=_LONG, num_warps=8)
    per_part = max(pieces(rows * pieces(width, 512), 4 * cores(x.device)), 8)
    parts = x.new_empty((pieces(rows, per_part), width), dtype=torch.float32)
    programs = parts.shape[0] * pieces(width, 512)
    launch(kernels.gamma_long, programs, dy, x, rstd, parts, rows, width, per_part, ROWS=8, COLUMNS=512)
    return parts


def _supports(x: Tensor, gamma: Tensor) -> bool:
    return takes(x) and gamma.numel() > 0


def forward(x: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """``(y, rstd)``."""
    y, _, rstd = residual_forward(x, None, gamma, epsilon)
    return y, rstd


def backward(dy: Tensor, x: Tensor, gamma: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of x and gamma."""
    return residual_backward(dy, None, x, gamma, rstd)


KERNELS: Final[dict[str, Kernel]] = {
    "rms_norm": Kernel(forward, lambda x, gamma, epsilon: _supports(x, gamma)),
    "rms_norm_backward": Kernel(backward, lambda dy, x, gamma, rstd: _supports(x, gamma)),
    "rms_norm_residual": Kernel(residual_forward, lambda x, residual, gamma, epsilon: _supports(x, gamma)),
    "rms_norm_residual_backward": Kernel(residual_backward, lambda dy, dtotal, total, gamma, rstd: _supports(total, gamma)),
}
