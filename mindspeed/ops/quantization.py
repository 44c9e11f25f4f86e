"""Scales and integers: what the quantized operators share."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed.ops.numerics import unflatten


def float_scale(scale: Tensor) -> Tensor:
    """Scales as fp32; an int64 one carries the bits of an fp32 number in its lower half, as the accelerator wants them."""
    if scale.dtype in (torch.int64, torch.uint64):
        return unflatten(scale.contiguous().view(torch.int32), -1, (-1, 2))[..., 0].contiguous().view(torch.float32)
    return scale.float()


def integer_product(x: Tensor, weight: Tensor) -> Tensor:
    """Product of int8 matrices, exact: fp64 holds every sum that int32 can."""
    return x.double() @ weight.double()


def to_int8(x: Tensor) -> Tensor:
    """Rounded half to even, kept between -128 and 127."""
    return x.round().clamp(-128, 127).to(torch.int8)


def dequantized(weight: Tensor, scale: Tensor, offset: Tensor | None) -> Tensor:
    """``(weight + offset) scale`` in fp32 of a weight [K, N], scale and offset [], [1], [N], [1, N] or, by rows, [K / g, N]."""
    rows = weight.shape[0]
    wide = weight.float() if offset is None else weight.float() + _by_row(offset, rows)
    return wide * _by_row(scale, rows)


def _by_row(x: Tensor, rows: int) -> Tensor:
    return x.float() if x.dim() < 2 or x.shape[0] == 1 else x.float().repeat_interleave(rows // x.shape[0], 0)
