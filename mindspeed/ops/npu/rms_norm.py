"""`rms_norm` by ``npu_rms_norm`` and ``npu_rms_norm_backward``, `rms_norm_residual` by ``npu_add_rms_norm``.

The gradient of gamma comes as fp32 and is rounded here. The gradient of the sum is added in fp32 to what
``npu_rms_norm_backward`` gives. fp64 and a single row without a dimension of its own run the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from mindspeed.ops.npu import TYPES, filled
from mindspeed.ops.numerics import rounded, wide
from mindspeed.ops.rms_norm import _backward, _forward, _residual_backward, _residual_forward


def _supports(x: Tensor) -> bool:
    return x.dtype in TYPES and 1 < x.dim() <= 8 and filled(x)


def forward(x: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    if not _supports(x):
        return _forward(x, gamma, epsilon)
    y, rstd = torch.ops.npu.npu_rms_norm(x, gamma, epsilon=epsilon)
    return y, rstd


def backward(dy: Tensor, x: Tensor, gamma: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    if not _supports(x):
        return _backward(dy, x, gamma, rstd)
    dx, dgamma = torch.ops.npu.npu_rms_norm_backward(dy, x, gamma, rstd)
    return dx, rounded(dgamma, gamma.dtype)


def residual_forward(x: Tensor, residual: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    if not _supports(x):
        return _residual_forward(x, residual, gamma, epsilon)
    y, rstd, total = torch.ops.npu.npu_add_rms_norm(x, residual, gamma, epsilon=epsilon)
    return y, total, rstd


def residual_backward(dy: Tensor, dsum: Tensor, total: Tensor, gamma: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    if not _supports(total):
        return _residual_backward(dy, dsum, total, gamma, rstd)
    dx, dgamma = torch.ops.npu.npu_rms_norm_backward(dy, total, gamma, rstd)
    return rounded(wide(dsum) + wide(dx), total.dtype), rounded(dgamma, gamma.dtype)


KERNELS: Final[dict[str, Callable[..., Any]]] = {
    "rms_norm": forward,
    "rms_norm_backward": backward,
    "rms_norm_residual": residual_forward,
    "rms_norm_residual_backward": residual_backward,
}
