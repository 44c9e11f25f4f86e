"""Weight gradient added in place: ``grad += grad_output^T total_input``, the product never being rounded to their type."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from mindspeed.ops.autocast import in_autocast_type
from mindspeed.ops.errors import require
from mindspeed.ops.numerics import wide, wide_type
from mindspeed.ops.registration import define, like, product_operations


@in_autocast_type("total_input", "grad_output")
def npu_matmul_add_fp32(total_input: Tensor, grad_output: Tensor, grad: Tensor) -> None:
    """Add the weight gradient of a linear layer to ``grad``.

    ``total_input`` is [T, I] and ``grad_output`` [T, O] of one floating-point type, ``grad`` [O, I] fp32 (fp64 for fp64
    input). Without tokens nothing changes. Raises OperatorError for other shapes or types.
    """
    op = "npu_matmul_add_fp32"
    one_type = total_input.is_floating_point() and total_input.dtype == grad_output.dtype
    require(one_type, op, f"total_input is {total_input.dtype}, but grad_output is {grad_output.dtype}")
    fits = total_input.dim() == grad_output.dim() == 2 and total_input.shape[0] == grad_output.shape[0]
    shapes = f"total_input of shape {tuple(total_input.shape)} and grad_output of shape {tuple(grad_output.shape)}"
    require(fits, op, f"{shapes} must have one row per token")
    shape = (grad_output.shape[1], total_input.shape[1])
    ready = grad.dtype == wide_type(total_input.dtype) and tuple(grad.shape) == shape and not grad.requires_grad
    require(ready, op, f"grad must be a {wide_type(total_input.dtype)} buffer of shape {shape} that needs no gradient")
    torch.ops.mindspeed.npu_matmul_add_fp32(total_input.detach(), grad_output.detach(), grad)


def is_summed_wide(a: Tensor) -> bool:
    """Return whether products of ``a`` can be summed in fp32 without a copy of it in fp32: half-precision ones on the CPU."""
    return a.device.type == "cpu" and a.dtype in (torch.bfloat16, torch.float16)


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a b`` of [..., K] and [K, N], or of batches [B, M, K] and [B, K, N], in the type for sums."""
    if not is_summed_wide(a):
        return wide(a) @ wide(b)
    product = torch.zeros((*a.shape[:-1], b.shape[-1]), dtype=torch.float32)
    flat = (a.reshape(-1, a.shape[-1]), b, product.view(-1, b.shape[-1]))
    matrices = zip(a, b, product, strict=True) if b.dim() == 3 else [flat]
    for left, right, into in matrices:
        torch.ops.mindspeed.npu_matmul_add_fp32(right, left.t(), into)
    return product


_BLOCK: Final = 8192
"""Columns of ``grad_output`` that the reference computes at once, so that it widens no more of them."""


def _add(total_input: Tensor, grad_output: Tensor, grad: Tensor) -> None:
    x = wide(total_input)
    for start in range(0, grad.shape[0], _BLOCK):
        block = slice(start, start + _BLOCK)
        grad[block].addmm_(wide(grad_output[:, block]).t(), x)


define(
    "npu_matmul_add_fp32(Tensor total_input, Tensor grad_output, Tensor(a!) grad) -> ()",
    _add,
    like(),
    operations=product_operations,
)
