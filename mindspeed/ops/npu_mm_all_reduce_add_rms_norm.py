"""Tensor-parallel product, its sum over ranks, residual and RMSNorm in one.

``mm = sum over ranks of (x1 x2 + bias)``, ``y = mm + residual``, ``norm = y / sqrt(mean(y^2) + epsilon) gamma``. The bias is
inside the sum: give it to one rank, or a share of it to each. Products, sum and norm are computed in fp32 (fp64 for
fp64 input), the norm from y before its rounding; each result is rounded once. Forward only.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mindspeed.ops.autocast import in_autocast_type
from mindspeed.ops.errors import require
from mindspeed.ops.npu_matmul_add_fp32 import wide_product
from mindspeed.ops.numerics import dequantized, float_scale, integer_product, wide
from mindspeed.ops.process_groups import Group, all_reduce, name_of
from mindspeed.ops.registration import define, like, no_gradient, product_operations


class ProductInputs(NamedTuple):
    """The arguments of the operator, in the order of the schema."""

    x1: Tensor
    x2: Tensor
    residual: Tensor
    gamma: Tensor
    bias: Tensor | None
    antiquant_scale: Tensor | None
    antiquant_offset: Tensor | None
    dequant_scale: Tensor | None
    group: str
    epsilon: float


@in_autocast_type("x1", "x2", "residual", "gamma", "bias")
def npu_mm_all_reduce_add_rms_norm(
    x1: Tensor,
    x2: Tensor,
    residual: Tensor,
    gamma: Tensor,
    hcom: Group,
    reduce_op: str = "sum",
    epsilon: float = 1e-6,
    bias: Tensor | None = None,
    antiquant_scale: Tensor | None = None,
    antiquant_offset: Tensor | None = None,
    dequant_scale: Tensor | None = None,
    antiquant_group_size: int = 0,
    comm_turn: int = 0,
) -> tuple[Tensor, Tensor]:
    """Give ``(y, norm)`` in the type of the residual.

    ``x1`` is [..., K], ``x2`` [K, N], ``residual`` [..., N] with as many rows in any shape, ``gamma`` and ``bias`` [N].
    All of one floating-point type; or x1 and x2 int8, bias int32, with ``dequant_scale`` [1] or [N]; or x2 alone int8 with
    ``antiquant_scale`` [1], [N] or, in groups of ``antiquant_group_size`` rows, [K / group, N].
    ``comm_turn`` changes nothing. Raises OperatorError for others.
    """
    op = "npu_mm_all_reduce_add_rms_norm"
    tensors = (x1, x2, residual, gamma, bias, antiquant_scale, antiquant_offset, dequant_scale)
    inputs = ProductInputs(*tensors, name_of(op, hcom), epsilon)
    check(op, inputs, reduce_op, antiquant_group_size)
    y, norm = torch.ops.mindspeed.npu_mm_all_reduce_add_rms_norm(*inputs)
    return y, norm


def check(op: str, inputs: ProductInputs, reduce_op: str, group_size: int) -> None:
    """Refuse what does not fit, and a scale whose rows are not one per ``group_size`` rows of ``x2``."""
    x1, x2, residual, gamma, bias, antiquant_scale, _, dequant_scale, _, _ = inputs
    require(reduce_op == "sum", op, f"reduce_op is {reduce_op}, but must be sum")
    fits = x1.dim() >= 2 and x2.dim() == 2 and x1.shape[-1] == x2.shape[0]
    require(fits, op, f"x1 of shape {tuple(x1.shape)} and x2 of shape {tuple(x2.shape)} cannot be multiplied")
    rows, width = x1[..., 0].numel() if x1.shape[-1] else residual[..., 0].numel(), x2.shape[1]
    same = residual.dim() >= 1 and residual.shape[-1] == width and residual.numel() == rows * width
    require(same, op, f"residual of shape {tuple(residual.shape)} must have {rows} rows of {width}")
    norm = tuple(gamma.shape) == (width,) and gamma.dtype == residual.dtype
    require(norm, op, f"gamma is {gamma.dtype} of shape {tuple(gamma.shape)}, but must be {residual.dtype} of shape {(width,)}")
    require(bias is None or tuple(bias.shape) == (width,), op, f"bias must have shape {(width,)}")
    types = f"x1, x2 and residual are {x1.dtype}, {x2.dtype} and {residual.dtype}"
    if x1.dtype == torch.int8:
        require(
            x2.dtype == torch.int8 and dequant_scale is not None, op, f"{types}, but int8 needs an int8 x2 and dequant_scale"
        )
    elif x2.dtype == torch.int8:
        require(
            x1.dtype == residual.dtype and antiquant_scale is not None, op, f"{types}, but an int8 x2 needs antiquant_scale"
        )
    else:
        require(x1.dtype == x2.dtype == residual.dtype and x1.is_floating_point(), op, f"{types}, but they must have one type")
    groups = 1 if antiquant_scale is None or antiquant_scale.dim() < 2 else antiquant_scale.shape[0]
    whole = groups == 1 if group_size == 0 else x2.shape[0] == groups * group_size
    scales = f"antiquant_scale has {groups} rows, but antiquant_group_size is {group_size}"
    require(whole, op, f"{scales}, for {x2.shape[0]} rows of x2")


def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    x1, x2, residual, gamma, bias, antiquant_scale, antiquant_offset, dequant_scale, group, epsilon = ProductInputs(*args)
    if dequant_scale is not None:
        product = integer_product(x1, x2)
        product = (product if bias is None else product + bias).float() * float_scale(dequant_scale)
    else:
        if antiquant_scale is None:
            product = wide_product(x1, x2)
        else:
            product = wide(x1) @ dequantized(x2, antiquant_scale, antiquant_offset)
        product = product if bias is None else product + wide(bias)
    y = all_reduce(product, group).view(residual.shape) + wide(residual)
    norm = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + epsilon) * wide(gamma)
    return y.to(residual.dtype, copy=True), norm.to(residual.dtype)


REST = (
    "Tensor gamma, Tensor? bias, Tensor? antiquant_scale, Tensor? antiquant_offset, Tensor? dequant_scale, str group, "
    "float epsilon"
)
"""Arguments after the residual, shared with the schema of the variant in place."""


define(
    f"npu_mm_all_reduce_add_rms_norm(Tensor x1, Tensor x2, Tensor residual, {REST}) -> (Tensor, Tensor)",
    _forward,
    like(2, 2),
    gradient=no_gradient("npu_mm_all_reduce_add_rms_norm"),
    operations=product_operations,
)
