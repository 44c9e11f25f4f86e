"""Grouped weight gradient added in place: ``grad[e] += x_e^T dy_e``, the product never being rounded to the type of ``x``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mindspeed.ops.autocast import in_autocast_type
from mindspeed.ops.errors import require
from mindspeed.ops.group_list import group_ranges, group_tensor
from mindspeed.ops.numerics import wide, wide_type
from mindspeed.ops.registration import define, like, product_operations


@in_autocast_type("x", "dy")
def npu_groupmatmul_add_fp32(x: Tensor, dy: Tensor, group_list: Tensor | Sequence[int], grad: Tensor) -> None:
    """Add the weight gradient of each group to its part of ``grad``.

    ``x`` is [T, K] and ``dy`` [T, N] of one floating-point type, ``group_list`` the cumulative ends of E groups, ``grad`` fp32
    (fp64 for fp64 input), contiguous, of E K N numbers in any shape. Raises OperatorError for others.
    """
    op = "npu_groupmatmul_add_fp32"
    groups = group_tensor(op, group_list)
    require(x.is_floating_point() and x.dtype == dy.dtype, op, f"x is {x.dtype}, but dy is {dy.dtype}")
    fits = x.dim() == dy.dim() == 2 and x.shape[0] == dy.shape[0]
    require(fits, op, f"x of shape {tuple(x.shape)} and dy of shape {tuple(dy.shape)} must have one row per token")
    shape = (groups.shape[0], x.shape[1], dy.shape[1])
    ready = grad.dtype == wide_type(x.dtype) and grad.is_contiguous() and not grad.requires_grad
    ready = ready and grad.numel() == shape[0] * shape[1] * shape[2]
    require(ready, op, f"grad must be a contiguous {wide_type(x.dtype)} buffer for {shape} that needs no gradient")
    torch.ops.mindspeed.npu_groupmatmul_add_fp32(x.detach(), dy.detach(), groups, grad)


def _add(x: Tensor, dy: Tensor, groups: Tensor, grad: Tensor) -> None:
    by_group = grad.view(groups.shape[0], x.shape[1], dy.shape[1])
    for e, (start, end) in enumerate(group_ranges("npu_groupmatmul_add_fp32", groups, x.shape[0], True)):
        by_group[e].addmm_(wide(x[start:end]).t(), wide(dy[start:end]))


define(
    "npu_groupmatmul_add_fp32(Tensor x, Tensor dy, Tensor groups, Tensor(a!) grad) -> ()",
    _add,
    like(),
    operations=product_operations,
)
