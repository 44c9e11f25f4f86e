"""Backward pass of a column-parallel linear layer under sequence parallelism."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed.tensor_parallel.linear import WeightGradient


def gathered_gradients(
    g_TN: Tensor, x_RK: Tensor, weight_NK: Tensor, group: dist.ProcessGroup, weight_gradient: WeightGradient
) -> tuple[Tensor, Tensor | None]:
    """Gather the input again behind the input gradient's product, and scatter that behind the weight gradient's.

    R rows of this rank, T of all ranks. Gives the gradients of the input [R, K] and of the weight.
    """
    x_TK = x_RK.new_empty(g_TN.shape[0], x_RK.shape[1])
    gathering = dist.all_gather_into_tensor(x_TK, x_RK.contiguous(), group=group, async_op=True)
    product = g_TN.matmul(weight_NK)
    grad_input = torch.empty_like(x_RK, memory_format=torch.contiguous_format)
    scattering = dist.reduce_scatter_tensor(grad_input, product, group=group, async_op=True)
    gathering.wait()
    grad_weight = weight_gradient(g_TN, x_TK)
    scattering.wait()
    return grad_input, grad_weight
