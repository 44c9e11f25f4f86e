"""Grouped products whose weight gradient is computed where the weight enters the graph, not where the product stands.

R rows of tokens sorted by expert, E experts, I and O the sizes of a product's input and output.

The gradients of a `grouped_product` are computed by two nodes: the product gives the gradient of its rows, and the node of
`deferred` that of the weight. Of the nodes that are ready, autograd runs the one that was made last. A weight that enters
between the post and the wait of a transfer therefore has its gradient computed while the reversed transfer is under way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mindspeed.ops.npu_gmm import GROUPED_SUM, npu_gmm


class Operands(NamedTuple):
    """Rows ``x`` [R, I] of a product and the gradient ``dy`` [R, O] of its result. ``ends`` [E] are the last rows of the
    experts plus one, ``first`` is the first of these experts among all of the weight. ``x`` may still be on its way."""

    x: Tensor | Callable[[], Tensor]
    dy: Tensor
    ends: Tensor
    first: int


ExpertWeightGradient = Callable[[Tensor, Operands], Tensor]
"""Compute the gradient [E, I, O] of some experts of a weight, or add it elsewhere and return any tensor of that shape."""


@dataclass(slots=True)
class Weight:
    """The weight of one call: its experts as a matrix each, and the operands of its gradient once backward has them."""

    matrices: Tensor
    operands: list[Operands] = field(default_factory=list)


def weight_gradient(parameter: Tensor, operands: Operands) -> Tensor:
    """Compute the gradient [E, I, O] as a grouped sum over rows."""
    x = operands.x if isinstance(operands.x, Tensor) else operands.x()
    return npu_gmm(x.t(), operands.dy, group_list=operands.ends, group_type=GROUPED_SUM)


def joined(operands: Sequence[Operands]) -> list[Operands]:
    """Join operands of single experts that came in slices: the gradient is one product for all of them, rounded once."""
    by_first: dict[int, list[Operands]] = {}
    for part in operands:
        by_first.setdefault(part.first, []).append(part)
    if len(by_first) == len(operands):
        return list(operands)
    first, *rest = sorted(by_first)
    if rest != [*range(first + 1, first + 1 + len(rest))]:
        return [_concatenated([parts]) for parts in by_first.values()]
    return [_concatenated([by_first[number] for number in (first, *rest)])]


def _concatenated(experts: Sequence[Sequence[Operands]]) -> Operands:
    """Put the slices of consecutive experts one behind another."""
    parts = [part for slices in experts for part in slices]
    x = torch.cat([part.x if isinstance(part.x, Tensor) else part.x() for part in parts])
    counts = torch.cat([torch.stack([part.ends for part in slices]).sum(0) for slices in experts])
    return Operands(x, torch.cat([part.dy for part in parts]), counts.cumsum(0), parts[0].first)


def deferred(parameter: Tensor, experts: int, rows: int, gradient: ExpertWeightGradient = weight_gradient) -> Weight:
    """Let a parameter of ``experts`` x ``rows`` x O numbers, in any shape, enter the graph here."""
    operands: list[Operands] = []
    matrices = _Deferred.apply(parameter, experts, rows, operands, gradient)  # type: ignore[no-untyped-call]
    return Weight(matrices, operands)


def grouped_product(x_RI: Tensor, weight: Weight, ends: Tensor, first: int = 0) -> Tensor:
    """Multiply rows by the matrix of their expert: [R, O]. ``ends`` [E] belong to the experts from ``first`` on."""
    y_RO: Tensor = _Product.apply(x_RI, weight.matrices, ends, first, weight.operands)  # type: ignore[no-untyped-call]
    return y_RO


class _Deferred(torch.autograd.Function):
    """Identity on a parameter; backward computes its gradient from the operands that the products left."""

    @staticmethod
    def forward(
        ctx: Any, parameter: Tensor, experts: int, rows: int, operands: list[Operands], gradient: ExpertWeightGradient
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.parameter, ctx.operands, ctx.gradient, ctx.shape = parameter, operands, gradient, (experts, rows, -1)
        return parameter.view(ctx.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None, None, None, None]:
        operands, parameter = joined(ctx.operands), ctx.parameter
        ctx.operands.clear()
        if len(operands) == 1 and len(operands[0].ends) == ctx.shape[0]:
            gradient = ctx.gradient(parameter, operands.pop())
        else:
            gradient = torch.zeros_like(parameter).view(ctx.shape)
            while operands:
                part = operands.pop()
                gradient[part.first : part.first + len(part.ends)] = ctx.gradient(parameter, part)
        return gradient.view_as(parameter), None, None, None, None


class _Product(torch.autograd.Function):
    """The product; backward gives the gradient of the rows, and leaves the operands of the weight's."""

    @staticmethod
    def forward(ctx: Any, x_RI: Tensor, matrices_EIO: Tensor, ends: Tensor, first: int, operands: list[Operands]) -> Tensor:
        ctx.save_for_backward(x_RI, matrices_EIO, ends)
        ctx.first, ctx.operands = first, operands
        return npu_gmm(x_RI, matrices_EIO[first : first + len(ends)], group_list=ends)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        (dy_RO,) = grads
        x_RI, matrices_EIO, ends = ctx.saved_tensors
        if ctx.needs_input_grad[1]:
            ctx.operands.append(Operands(x_RI, dy_RO, ends, ctx.first))
        return rows_gradient(dy_RO, matrices_EIO, ends, ctx.first), None, None, None, None


def rows_gradient(dy_RO: Tensor, matrices_EIO: Tensor, ends: Tensor, first: int) -> Tensor:
    """Multiply gradients of results by the transposed matrix of their expert: [R, I]."""
    matrices = matrices_EIO[first : first + len(ends)].transpose(1, 2)
    return npu_gmm(dy_RO, matrices, group_list=ends)
