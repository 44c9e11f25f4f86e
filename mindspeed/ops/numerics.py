"""The arithmetic that every reference keeps: computed wide, rounded once."""

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
