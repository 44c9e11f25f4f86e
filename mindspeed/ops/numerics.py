"""The arithmetic that every reference keeps: computed wide, rounded once; and scales and integers of the quantized ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """The type for sums: fp64 for fp64, fp32 for every other floating-point type."""
    return torch.promote_types(dtype, torch.float32)


def wide(x: Tensor) -> Tensor:
    """``x`` in the type for sums."""
    return x.to(wide_type(x.dtype))


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A result in its type, and contiguous, as the shape kernels promise whatever order the strides of the inputs have."""
    return x.to(dtype).contiguous()


def filled(*tensors: Tensor) -> bool:
    """Return whether every tensor has elements; kernels of other libraries promise nothing for empty ones."""
    return all(x.numel() > 0 for x in tensors)


def unflatten(x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """`Tensor.unflatten`, which torch leaves without types: dimension ``dim`` becomes several."""
    split: Tensor = x.unflatten(dim, sizes)  # type: ignore[no-untyped-call]
    return split


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
