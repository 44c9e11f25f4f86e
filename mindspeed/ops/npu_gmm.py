"""Grouped matrix product: each group of consecutive rows times its matrix, empty groups included.

Products are accumulated in fp32 (fp64 for fp64) and rounded once. Saved for backward: ``x`` and ``weight``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from mindspeed.ops.autocast import in_autocast_type
from mindspeed.ops.errors import require
from mindspeed.ops.group_list import group_ranges, group_tensor
from mindspeed.ops.npu_groupmatmul_add_fp32 import npu_groupmatmul_add_fp32
from mindspeed.ops.numerics import wide, wide_type
from mindspeed.ops.registration import define, no_gradient, product_operations

GROUPED_ROWS, GROUPED_SUM = 0, 2
_ONLY_ROWS: Final = "a list of matrices supports neither group_type 2, nor bias, nor gemm_fusion"


@in_autocast_type("x", "weight", "bias")
def npu_gmm(
    x: Tensor,
    weight: Tensor | Sequence[Tensor],
    *,
    bias: Tensor | None = None,
    group_list: Tensor | Sequence[int],
    group_type: int = GROUPED_ROWS,
    gemm_fusion: bool = False,
    original_weight: Tensor | None = None,
) -> Tensor:
    """Grouped product with ``group_list`` the cumulative ends of the groups, the last being the number of rows.

    ``group_type`` 0: ``x`` [M, K], ``weight`` [E, K, N] or E matrices [K, N], ``bias`` [E, N] give [M, N].
    ``group_type`` 2: ``x`` [K, M], ``weight`` [M, N] give [E, K, N], one product per group of the M they share.
    With ``gemm_fusion`` the gradient of the weight is added to ``original_weight.main_grad`` (fp32, E K N numbers) by the
    product itself; ``original_weight.grad_added_to_main_grad`` is set and the gradient that autograd gets is a dummy.
    Raises OperatorError for other shapes, types or group lists.
    """
    return _checked("npu_gmm", x, weight, bias, group_list, group_type, True, original_weight if gemm_fusion else None)


@in_autocast_type("x", "weight", "bias")
def npu_gmm_v2(
    x: Tensor,
    weight: Tensor | Sequence[Tensor],
    *,
    bias: Tensor | None = None,
    group_list: Tensor | Sequence[int],
    group_type: int = GROUPED_ROWS,
    gemm_fusion: bool = False,
    original_weight: Tensor | None = None,
) -> Tensor:
    """Grouped product with ``group_list`` the size of each group; else as `npu_gmm`."""
    return _checked("npu_gmm_v2", x, weight, bias, group_list, group_type, False, original_weight if gemm_fusion else None)


def _checked(
    op: str,
    x: Tensor,
    weight: Tensor | Sequence[Tensor],
    bias: Tensor | None,
    group_list: Tensor | Sequence[int],
    group_type: int,
    cumulative: bool,
    original: Tensor | None,
) -> Tensor:
    groups = group_tensor(op, group_list)
    if not isinstance(weight, Tensor):
        require(group_type == GROUPED_ROWS and bias is None and original is None, op, _ONLY_ROWS)
        return _checked_separate(op, x, weight, groups, cumulative)
    require(x.is_floating_point() and x.dtype == weight.dtype, op, f"x is {x.dtype}, but weight is {weight.dtype}")
    require(group_type in (GROUPED_ROWS, GROUPED_SUM), op, f"group_type is {group_type}, but must be 0 or 2")
    wanted = 3 if group_type == GROUPED_ROWS else 2
    fits = x.dim() == 2 and weight.dim() == wanted and x.shape[1] == weight.shape[-2]
    require(fits, op, f"x of shape {tuple(x.shape)} and weight of shape {tuple(weight.shape)} cannot be multiplied")
    y: Tensor
    if group_type == GROUPED_SUM:
        require(bias is None and original is None, op, "group_type 2 supports neither bias nor gemm_fusion")
        y = torch.ops.mindspeed.npu_gmm_sum(x.t(), weight, groups, cumulative)
        return y
    experts = groups.shape[0]
    require(weight.shape[0] == experts, op, f"weight has {weight.shape[0]} matrices, but group_list has {experts} groups")
    right = bias is None or (tuple(bias.shape) == (experts, weight.shape[2]) and bias.is_floating_point())
    require(right, op, f"bias must have a floating-point type and shape {(experts, weight.shape[2])}")
    if original is None:
        y = torch.ops.mindspeed.npu_gmm(x, weight, bias, groups, cumulative)
        return y
    require(bias is None, op, "gemm_fusion does not support bias")
    grad = getattr(original, "main_grad", None)
    ready = grad is not None and grad.numel() == weight.numel() and grad.dtype == wide_type(x.dtype) and grad.is_contiguous()
    require(ready, op, "gemm_fusion needs original_weight.main_grad, which must be contiguous, fp32 and of the size of weight")
    ends = groups if cumulative else groups.cumsum(0)
    y = _AccumulatingWeight.apply(x, weight, ends, original)  # type: ignore[no-untyped-call]
    return y


def _checked_separate(op: str, x: Tensor, weights: Sequence[Tensor], groups: Tensor, cumulative: bool) -> Tensor:
    experts = groups.shape[0]
    require(len(weights) == experts, op, f"weight has {len(weights)} matrices, but group_list has {experts} groups")
    kinds = {(weight.dtype, tuple(weight.shape)) for weight in weights}
    require(len(kinds) == 1, op, f"the matrices of weight have different types or shapes: {sorted(map(str, kinds))}")
    require(x.is_floating_point() and x.dtype == weights[0].dtype, op, f"x is {x.dtype}, but weight is {weights[0].dtype}")
    fits = x.dim() == weights[0].dim() == 2 and x.shape[1] == weights[0].shape[0]
    shape = tuple(weights[0].shape)
    require(fits, op, f"x of shape {tuple(x.shape)} and matrices of shape {shape} cannot be multiplied")
    y: Tensor = torch.ops.mindspeed.npu_gmm_separate(x, list(weights), groups, cumulative)
    return y


class _AccumulatingWeight(torch.autograd.Function):
    """The product whose weight gradient goes into ``main_grad``, as Megatron's gradient accumulation fusion wants it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor, original: Tensor) -> Tensor:
        ctx.original = original
        ctx.save_for_backward(x, weight, ends)
        y: Tensor = torch.ops.mindspeed.npu_gmm(x, weight, None, ends, True)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (dy,) = grads
        x, weight, ends = ctx.saved_tensors
        dx = torch.ops.mindspeed.npu_gmm(dy, weight.transpose(1, 2), None, ends, True)
        npu_groupmatmul_add_fp32(x, dy, ends, ctx.original.main_grad)
        ctx.original.grad_added_to_main_grad = True
        zero = getattr(ctx.original, "zero_out_wgrad", False)
        dummy = torch.zeros_like(weight) if zero else torch.empty_like(weight)
        return dx, dummy, None, None


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, groups: Tensor, cumulative: bool) -> Tensor:
    y = x.new_empty((x.shape[0], weight.shape[2]))
    for e, (start, end) in enumerate(group_ranges("npu_gmm", groups, x.shape[0], cumulative)):
        product = wide(x[start:end]) @ wide(weight[e])
        y[start:end] = product if bias is None else product + wide(bias[e])
    return y


def _separate(x: Tensor, weights: Sequence[Tensor], groups: Tensor, cumulative: bool) -> Tensor:
    y: Tensor = torch.ops.mindspeed.npu_gmm(x, torch.stack(list(weights)), None, groups, cumulative)
    return y


def _sum(x: Tensor, dy: Tensor, groups: Tensor, cumulative: bool) -> Tensor:
    """Reference of ``x_e^T dy_e`` for each group e: [M, K] and [M, N] to [E, K, N]."""
    out = x.new_empty((groups.shape[0], x.shape[1], dy.shape[1]))
    for e, (start, end) in enumerate(group_ranges("npu_gmm", groups, x.shape[0], cumulative)):
        out[e] = wide(x[start:end]).t() @ wide(dy[start:end])
    return out


def _bias_sum(dy: Tensor, groups: Tensor, cumulative: bool) -> Tensor:
    """Reference of the sum of each group's rows, in a wide type: [M, N] to [E, N]."""
    ranges = group_ranges("npu_gmm", groups, dy.shape[0], cumulative)
    return torch.stack([wide(dy[start:end]).sum(0) for start, end in ranges])


def _forward_shape(x: Tensor, weight: Tensor, bias: Tensor | None, groups: Tensor, cumulative: bool) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[2]))


def _separate_shape(x: Tensor, weights: Sequence[Tensor], groups: Tensor, cumulative: bool) -> Tensor:
    return x.new_empty((x.shape[0], weights[0].shape[1]))


def _separate_operations(x: Tensor, weights: Sequence[Tensor], *rest: object) -> int:
    return product_operations(x, weights[0])


def _sum_shape(x: Tensor, dy: Tensor, groups: Tensor, cumulative: bool) -> Tensor:
    return x.new_empty((groups.shape[0], x.shape[1], dy.shape[1]))


def _bias_sum_shape(dy: Tensor, groups: Tensor, cumulative: bool) -> Tensor:
    return dy.new_empty((groups.shape[0], dy.shape[1]), dtype=wide_type(dy.dtype))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, groups, ctx.cumulative = inputs
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(x, weight, groups)


def _gradient(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, groups = ctx.saved_tensors
    ops = torch.ops.mindspeed
    dx = dweight = dbias = None
    if ctx.needs_input_grad[0]:
        dx = ops.npu_gmm(dy, weight.transpose(1, 2), None, groups, ctx.cumulative)
    if ctx.needs_input_grad[1]:
        dweight = ops.npu_gmm_sum(x, dy, groups, ctx.cumulative)
    if ctx.needs_input_grad[2]:
        dbias = ops.npu_gmm_bias(dy, groups, ctx.cumulative).to(ctx.bias_dtype)
    return dx, dweight, dbias, None, None


def _separate_save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weights, groups, ctx.cumulative = inputs
    ctx.save_for_backward(x, groups, *weights)


def _separate_gradient(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    x, groups, *weights = ctx.saved_tensors
    ops = torch.ops.mindspeed
    dx = ops.npu_gmm_separate(dy, [weight.t() for weight in weights], groups, ctx.cumulative)
    return dx, list(ops.npu_gmm_sum(x, dy, groups, ctx.cumulative).unbind()), None, None


def _sum_save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, dy, groups, ctx.cumulative = inputs
    ctx.save_for_backward(x, dy, groups)


def _sum_gradient(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, None, None]:
    x, dy, groups = ctx.saved_tensors
    dx = torch.ops.mindspeed.npu_gmm(dy, dout.transpose(1, 2), None, groups, ctx.cumulative)
    return dx, torch.ops.mindspeed.npu_gmm(x, dout, None, groups, ctx.cumulative), None, None


define(
    "npu_gmm(Tensor x, Tensor weight, Tensor? bias, Tensor groups, bool cumulative) -> Tensor",
    _forward,
    _forward_shape,
    _save,
    _gradient,
    product_operations,  # without reading the groups, which together have all rows
)
define(
    "npu_gmm_separate(Tensor x, Tensor[] weights, Tensor groups, bool cumulative) -> Tensor",
    _separate,
    _separate_shape,
    _separate_save,
    _separate_gradient,
    _separate_operations,
)
define(
    "npu_gmm_sum(Tensor x, Tensor dy, Tensor groups, bool cumulative) -> Tensor",
    _sum,
    _sum_shape,
    _sum_save,
    _sum_gradient,
    product_operations,
)
define(
    "npu_gmm_bias(Tensor dy, Tensor groups, bool cumulative) -> Tensor",
    _bias_sum,
    _bias_sum_shape,
    gradient=no_gradient("npu_gmm"),
)
