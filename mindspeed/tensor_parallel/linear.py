"""The autograd function of a linear layer whose products and collectives are those of a feature."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed.ops.process_groups import post_all_gather, post_reduce_scatter

WeightGradient: TypeAlias = Callable[[Tensor, Tensor], Tensor | None]
"""From the gradient of the output [T, N] and the input [T, K] to the gradient of the weight [N, K], or None where it has
been added to a buffer."""


class Products(Protocol):
    """The product of a linear layer in both directions, with its collectives.

    R rows of this rank's input, T rows of its output; K input and N output features of this rank's input and output. The
    shape of the weight belongs to the implementation.
    """

    def forward(self, x_RK: Tensor, weight: Tensor) -> Tensor:
        """Return the output [T, N] without bias."""

    def input_gradient(self, g_TN: Tensor, weight: Tensor) -> Tensor:
        """Return the gradient of the input [R, K]; the weight is frozen."""

    def gradients(
        self, g_TN: Tensor, x_RK: Tensor, weight: Tensor, weight_gradient: WeightGradient
    ) -> tuple[Tensor, Tensor | None]:
        """Return the gradients of the input and of the weight, which ``weight_gradient`` makes."""


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, products: Products, weight_gradient: WeightGradient
    ) -> Tensor:
        ctx.products, ctx.weight_gradient, ctx.shape = products, weight_gradient, x.shape
        ctx.save_for_backward(*([x, weight] if ctx.needs_input_grad[1] else [weight]))
        y = products.forward(_rows(x), weight)
        if bias is not None:
            y = y + bias
        return y.view(-1, *x.shape[1:-1], y.shape[-1])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, weight = ctx.saved_tensors
        g_TN = _rows(g)
        if inputs:
            (x,) = inputs
            grad_input, grad_weight = ctx.products.gradients(g_TN, _rows(x), weight, ctx.weight_gradient)
        else:
            grad_input, grad_weight = ctx.products.input_gradient(g_TN, weight), None
        grad_bias = g_TN.sum(dim=0) if ctx.needs_input_grad[2] else None
        return grad_input.view(ctx.shape), grad_weight, grad_bias, None, None


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, products: Products, weight_gradient: WeightGradient | None = None
) -> Tensor:
    """Multiply ``x`` [sequence, ..., K] by a weight; a frozen one keeps no input for backward and has no gradient."""
    y: Tensor = _Linear.apply(x, weight, bias, products, weight_gradient or plain_weight_gradient)  # type: ignore[no-untyped-call]
    return y


class _Replicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: Sequence[dist.ProcessGroup]) -> Tensor:
        ctx.groups = groups
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        g = g.clone(memory_format=torch.contiguous_format)
        for group in ctx.groups:
            dist.all_reduce(g, group=group)
        return g, None


def replicated(x: Tensor, *groups: dist.ProcessGroup) -> Tensor:
    """Return ``x``, which is equal on all ranks; its gradient is summed over them, in one group after the other."""
    same: Tensor = _Replicated.apply(x, groups)  # type: ignore[no-untyped-call]
    return same


def plain_weight_gradient(g_TN: Tensor, x_TK: Tensor) -> Tensor:
    """The gradient of a weight [N, K] as a new tensor."""
    return g_TN.t().matmul(x_TK)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def gathered_gradients(
    g_TN: Tensor, x_RK: Tensor, weight_NK: Tensor, group: dist.ProcessGroup, weight_gradient: WeightGradient
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of a column-parallel layer under sequence parallelism.

    Gather the input again behind the input gradient's product, and scatter that behind the weight gradient's.

    R rows of this rank, T of all ranks. Gives the gradients of the input [R, K] and of the weight.
    """
    gathering = post_all_gather(group, x_RK)
    scattering = post_reduce_scatter(group, g_TN.matmul(weight_NK))
    grad_weight = weight_gradient(g_TN, gathering.wait())
    return scattering.wait(), grad_weight
