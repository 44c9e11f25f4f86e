"""`rms_norm` by ``npu_rms_norm`` and ``npu_rms_norm_backward``, `rms_norm_residual` by ``npu_add_rms_norm``.

The gradient of gamma comes as fp32 and is rounded here. The gradient of the sum is added in fp32 to what
``npu_rms_norm_backward`` gives. fp64 and a single row without a dimension of its own run the reference.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from mindspeed.ops.npu import TYPES
from mindspeed.ops.numerics import filled, rounded, wide
from mindspeed.ops.registration import Kernel


def _supports(x: Tensor) -> bool:
    return x.dtype in TYPES and 1 < x.dim() <= 8 and filled(x)


def forward(x: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    y, rstd = torch.ops.npu.npu_rms_norm(x, gamma, epsilon=epsilon)
    return y, rstd


def backward(dy: Tensor, x: Tensor, gamma: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    dx, dgamma = torch.ops.npu.npu_rms_norm_backward(dy, x, gamma, rstd)
    return dx, rounded(dgamma, gamma.dtype)


def residual_forward(x: Tensor, residual: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    y, rstd, total = torch.ops.npu.npu_add_rms_norm(x, residual, gamma, epsilon=epsilon)
    return y, total, rstd


def residual_backward(dy: Tensor, dsum: Tensor, total: Tensor, gamma: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    dx, dgamma = torch.ops.npu.npu_rms_norm_backward(dy, total, gamma, rstd)
    return rounded(wide(dsum) + wide(dx), total.dtype), rounded(dgamma, gamma.dtype)


KERNELS: Final[dict[str, Kernel]] = {
    "rms_norm": Kernel(forward, lambda x, *_: _supports(x)),
    "rms_norm_backward": Kernel(backward, lambda dy, x, *_: _supports(x)),
    "rms_norm_residual": Kernel(residual_forward, lambda x, *_: _supports(x)),
    "rms_norm_residual_backward": Kernel(residual_backward, lambda dy, dsum, total, *_: _supports(total)),
}
