"""Weight gradients of grouped experts, added to their buffer by the product itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mindspeed.moe.grouped_experts import with_expert_mixin
from mindspeed.moe.products import Operands, weight_gradient
from mindspeed.ops.npu_groupmatmul_add_fp32 import npu_groupmatmul_add_fp32


class AccumulatingExperts:
    """Mixin before `GroupedExperts`: gradients are added to ``main_grad`` where it is fp32 and Megatron's hooks need it."""

    def weight_gradient(self, parameter: Any, operands: Operands) -> Tensor:
        """Add the gradient to the part of ``parameter.main_grad`` that the experts have; the result is a dummy then."""
        if not _has_buffer(parameter):
            return weight_gradient(parameter, operands)
        x = _rows(operands)
        shape = (len(operands.ends), x.shape[1], operands.dy.shape[1])
        matrices = parameter.main_grad.view(-1, *shape[1:])[operands.first : operands.first + shape[0]]
        npu_groupmatmul_add_fp32(x, operands.dy, operands.ends, matrices)
        parameter.grad_added_to_main_grad = True
        return _dummy(parameter, shape)

    def separate_gradient(self, weights_OI: Sequence[Any], stacked_EIO: Tensor, operands: Operands) -> Tensor:
        """Add the gradients of experts with separate weight parameters to their buffers; the result is a dummy."""
        if not all(map(_has_buffer, weights_OI)):
            return weight_gradient(stacked_EIO, operands)
        x, start = _rows(operands), 0
        ends = operands.ends.tolist()
        for weight, end in zip(weights_OI[operands.first : operands.first + len(ends)], ends, strict=True):
            npu_groupmatmul_add_fp32(operands.dy[start:end], x[start:end], [end - start], weight.main_grad)
            weight.grad_added_to_main_grad = True
            start = end
        return _dummy(weights_OI[0], (len(ends), *stacked_EIO.shape[1:]))


def _has_buffer(parameter: Any) -> bool:
    buffer = getattr(parameter, "main_grad", None)
    return buffer is not None and buffer.dtype == torch.float32 and hasattr(parameter, "grad_added_to_main_grad")


def _rows(operands: Operands) -> Tensor:
    return operands.x if isinstance(operands.x, Tensor) else operands.x()


def _dummy(parameter: Any, shape: Sequence[int]) -> Tensor:
    """Return what autograd passes on instead of a gradient: zeros where Megatron reads them, else anything."""
    make = torch.zeros if getattr(parameter, "zero_out_wgrad", False) else torch.empty
    return make(shape, dtype=parameter.dtype, device=parameter.device)


def with_accumulating_experts(spec: Any) -> Any:
    """Copy a spec whose grouped experts add their gradients to the buffer."""
    return with_expert_mixin(spec, AccumulatingExperts)
