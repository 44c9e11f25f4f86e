"""Weight gradients of grouped experts, added to their buffer by the product itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mindspeed.moe.grouped_experts import with_expert_mixin
from mindspeed.moe.products import Operands, weight_gradient
from mindspeed.ops.npu_groupmatmul_add_fp32 import npu_groupmatmul_add_fp32


class AccumulatingExperts:
    """Stands before `GroupedExperts`: gradients go into ``main_grad`` where that is fp32 and Megatron's hooks ask for it."""

    def weight_gradient(self, parameter: Any, operands: Operands) -> Tensor:
        """Add the gradient to the part of ``parameter.main_grad`` that the experts have; the result is a dummy then."""
        buffer = getattr(parameter, "main_grad", None)
        if buffer is None or buffer.dtype != torch.float32 or not hasattr(parameter, "grad_added_to_main_grad"):
            return weight_gradient(parameter, operands)
        x = operands.x if isinstance(operands.x, Tensor) else operands.x()
        shape = (len(operands.ends), x.shape[1], operands.dy.shape[1])
        matrices = buffer.view(-1, *shape[1:])[operands.first : operands.first + shape[0]]
        npu_groupmatmul_add_fp32(x, operands.dy, operands.ends, matrices)
        parameter.grad_added_to_main_grad = True
        make = torch.zeros if getattr(parameter, "zero_out_wgrad", False) else torch.empty
        return make(shape, dtype=parameter.dtype, device=parameter.device)


def with_accumulating_experts(spec: Any) -> Any:
    """Copy a spec whose grouped experts add their gradients to the buffer."""
    return with_expert_mixin(spec, AccumulatingExperts)
