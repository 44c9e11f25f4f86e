"""`npu_mm_all_reduce_add_rms_norm` that writes the sum over the residual."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed.ops.autocast import in_type_of
from mindspeed.ops.npu_mm_all_reduce_add_rms_norm import REST, ProductInputs, check
from mindspeed.ops.process_groups import Group, name_of
from mindspeed.ops.registration import define, like, product_operations, require_no_gradient


@in_type_of("residual", "x1", "x2", "gamma", "bias")
def npu_mm_all_reduce_add_rms_norm_(
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
    """Give ``(residual, norm)``, the residual now holding y; else as `npu_mm_all_reduce_add_rms_norm`.

    Raises OperatorError also where an operand needs a gradient, which a change in place would lose.
    """
    op = "npu_mm_all_reduce_add_rms_norm_"
    tensors = (x1, x2, residual, gamma, bias, antiquant_scale, antiquant_offset, dequant_scale)
    inputs = ProductInputs(*tensors, name_of(op, hcom), epsilon)
    check(op, inputs, reduce_op, antiquant_group_size)
    require_no_gradient(op, x1, x2, residual, gamma, bias)
    norm: Tensor = torch.ops.mindspeed.npu_mm_all_reduce_add_rms_norm_(*inputs)
    return residual, norm


def _in_place(x1: Tensor, x2: Tensor, residual: Tensor, *rest: object) -> Tensor:
    y, norm = torch.ops.mindspeed.npu_mm_all_reduce_add_rms_norm(x1, x2, residual, *rest)
    residual.copy_(y)
    return norm  # type: ignore[no-any-return]


define(
    f"npu_mm_all_reduce_add_rms_norm_(Tensor x1, Tensor x2, Tensor(a!) residual, {REST}) -> Tensor",
    _in_place,
    like(2),
    operations=product_operations,
)
