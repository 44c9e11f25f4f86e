"""Weight gradients of grouped experts, added to their buffer by the product itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mindspeed.moe.grouped_experts import with_expert_mixin
from mindspeed.moe.products import Operands, separate_gradient, weight_gradient
from mindspeed.ops.npu_groupmatmul_add_fp32 import npu_groupmatmul_add_fp32


class AccumulatingExperts:
    """Mixin before `GroupedExperts`: gradients are added to ``main_grad`` where it is fp32 and Megatron's hooks need it."""

    def weight_gradient(self, parameter: Any, operands: Operands) -> Tensor:
        """Add the gradient to the part of ``parameter.main_grad`` that the experts have; the result is a dummy then."""
        if not _has_buffer(parameter):
            return weight_gradient(parameter, operands)
        x = operands.rows
        shape = (len(operands.ends), x.shape[1], operands.dy.shape[1])
        matrices = parameter.main_grad.view(-1, *shape[1:])[operands.first : operands.first + shape[0]]
        npu_groupmatmul_add_fp32(x, operands.dy, operands.ends, matrices)
        parameter.grad_added_to_main_grad = True
        return _dummy(parameter, shape)

    def needs_counts(self, weights_OI: Sequence[Any]) -> bool:
        """Return whether every weight has a buffer, for each of which `separate_gradient` selects rows."""
        return all(map(_has_buffer, weights_OI))

    def separate_gradient(self, weights_OI: Sequence[Any], operands: Operands) -> Tensor:
        """Add the gradients of experts with separate weight parameters to their buffers; the result is a dummy.

        Each buffer takes a call: Megatron stores them in descending order of experts, which no grouped product can write.
        """
        if operands.counts is None:
            return separate_gradient(operands)
        counts = operands.counts()
        sizes = torch.split(operands.ends.diff(prepend=operands.ends.new_zeros(1)), 1)
        rows = zip(sizes, torch.split(operands.dy, counts), torch.split(operands.rows, counts), strict=True)
        weights = weights_OI[operands.first : operands.first + len(counts)]
        for weight, (size, dy, x) in zip(weights, rows, strict=True):
            if len(x):
                npu_groupmatmul_add_fp32(dy, x, size, weight.main_grad)
            weight.grad_added_to_main_grad = True
        return _dummy(weights[0], (len(weights), *weights[0].shape))


def _has_buffer(parameter: Any) -> bool:
    buffer = getattr(parameter, "main_grad", None)
    return buffer is not None and buffer.dtype == torch.float32 and hasattr(parameter, "grad_added_to_main_grad")


def _dummy(parameter: Any, shape: Sequence[int]) -> Tensor:
    """Return what autograd passes on instead of a gradient: zeros where Megatron reads them, else anything."""
    make = torch.zeros if getattr(parameter, "zero_out_wgrad", False) else torch.empty
    return make(shape, dtype=parameter.dtype, device=parameter.device)


def with_accumulating_experts(spec: Any) -> Any:
    """Copy a spec whose grouped experts add their gradients to the buffer."""
    return with_expert_mixin(spec, AccumulatingExperts)
