"""Sums over tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mindspeed.plugins.patches import Function, wrapper


@wrapper
def sum_of_any_strides(reduce: Function, input_: Tensor, group: Any) -> Any:
    """Wrap ``_reduce(input_, group)``: Megatron sums a contiguous copy of a strided tensor, and returns the tensor."""
    return reduce(input_.contiguous() if group.size() > 1 else input_, group)
