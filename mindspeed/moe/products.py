"""Grouped products whose weight gradient is computed where the weight enters the graph, not where the product stands.

R rows of tokens sorted by expert, E experts, I and O the sizes of a product's input and output.

The gradients of a `grouped_product` are computed by two nodes: the product gives the gradient of its rows, and the node of
`deferred` that of the weight. Of the nodes that are ready, autograd runs the one that was made last. A weight that enters
between the post and the wait of a transfer therefore has its gradient computed while the reversed transfer is under way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mindspeed.ops.npu_gmm import GROUPED_SUM, npu_gmm
from mindspeed.platforms.host_copy import HostCopy


class Operands(NamedTuple):
    """Rows ``x`` [R, I] of a product and the gradient ``dy`` [R, O] of its result. ``ends`` [E] are the last rows of the
    experts plus one, ``first`` is the first of these experts among all of the weight. ``x`` may still be on its way.

    ``counts`` are the rows of each expert, on the host, where the weight needs them there."""

    x: Tensor | Callable[[], Tensor]
    dy: Tensor
    ends: Tensor
    first: int
    counts: Counts | None = None

    @property
    def rows(self) -> Tensor:
        """``x``, after waiting for it."""
        return self.x if isinstance(self.x, Tensor) else self.x()


Counts = Callable[[], list[int]]
"""Give the rows of each expert, on the host."""

ExpertWeightGradient = Callable[[Tensor, Operands], Tensor]
"""Compute the gradient [E, I, O] of some experts of a weight, or add it elsewhere and return any tensor of that shape."""

SeparateGradient = Callable[[Operands], Tensor]
"""The same for a parameter [O, I] of each expert: [E, O, I]."""


@dataclass(slots=True)
class Weight:
    """The weight of one call, and the operands of its gradient once backward has them.

    ``matrices`` is one tensor [E, I, O], or a tensor [I, O] of each expert. With ``counted`` operands have their counts.
    """

    matrices: tuple[Tensor, ...]
    operands: list[Operands] = field(default_factory=list)
    counted: bool = False

    def counts(self, ends: Tensor) -> Counts | None:
        """Post the copy of counts to the host, where they are needed."""
        if not self.counted:
            return None
        copy = HostCopy(ends)
        return lambda: [end - start for start, end in pairwise([0, *copy.wait().tolist()])]


def weight_gradient(parameter: Tensor, operands: Operands) -> Tensor:
    """Compute the gradient [E, I, O] as a grouped sum over rows."""
    return npu_gmm(operands.rows.t(), operands.dy, group_list=operands.ends, group_type=GROUPED_SUM)


def separate_gradient(operands: Operands) -> Tensor:
    """Compute the gradient [E, O, I] as a grouped sum over rows."""
    return npu_gmm(operands.dy.t(), operands.rows, group_list=operands.ends, group_type=GROUPED_SUM)


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
    x = torch.cat([part.rows for part in parts])
    sizes = torch.cat([torch.stack([part.ends for part in slices]).sum(0) for slices in experts])

    def counts() -> list[int]:
        return [sum(part.counts()[0] for part in slices if part.counts is not None) for slices in experts]

    dy = torch.cat([part.dy for part in parts])
    return Operands(x, dy, sizes.cumsum(0), parts[0].first, None if parts[0].counts is None else counts)


def deferred(parameter: Tensor, experts: int, rows: int, gradient: ExpertWeightGradient = weight_gradient) -> Weight:
    """Let a parameter of ``experts`` x ``rows`` x O numbers, in any shape, enter the graph here."""
    operands: list[Operands] = []
    matrices = _Deferred.apply(parameter, experts, rows, operands, gradient)  # type: ignore[no-untyped-call]
    return Weight((matrices,), operands)


def deferred_separate(parameters: Sequence[Tensor], gradient: SeparateGradient, counted: bool) -> Weight:
    """Let a parameter [O, I] of each expert enter the graph here. With ``counted`` the gradient needs counts on the host."""
    operands: list[Operands] = []
    matrices = _DeferredSeparate.apply(operands, gradient, *parameters)  # type: ignore[no-untyped-call]
    return Weight(matrices, operands, counted)


def grouped_product(x_RI: Tensor, weight: Weight, ends: Tensor, first: int = 0) -> Tensor:
    """Multiply rows by the matrix of their expert: [R, O]. ``ends`` [E] belong to the experts from ``first`` on."""
    y_RO: Tensor = _Product.apply(x_RI, ends, first, weight, *weight.matrices)  # type: ignore[no-untyped-call]
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


class _DeferredSeparate(torch.autograd.Function):
    """The transposes of a parameter of each expert; backward computes their gradients as `_Deferred` does."""

    @staticmethod
    def forward(ctx: Any, operands: list[Operands], gradient: SeparateGradient, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.parameters, ctx.operands, ctx.gradient = parameters, operands, gradient
        return tuple(parameter.t() for parameter in parameters)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        operands, gradients = joined(ctx.operands), dict[int, Tensor]()
        ctx.operands.clear()
        while operands:
            part = operands.pop()
            gradients |= enumerate(ctx.gradient(part).unbind(), part.first)
        every = [gradients[e] if e in gradients else torch.zeros_like(p) for e, p in enumerate(ctx.parameters)]
        return None, None, *every


class _Product(torch.autograd.Function):
    """The product; backward gives the gradient of the rows, and leaves the operands of the weight's."""

    @staticmethod
    def forward(ctx: Any, x_RI: Tensor, ends: Tensor, first: int, weight: Weight, *matrices: Tensor) -> Tensor:
        ctx.save_for_backward(x_RI, ends, *matrices)
        ctx.first, ctx.operands = first, weight.operands
        ctx.counts = weight.counts(ends) if ctx.needs_input_grad[4] else None
        return rows_product(x_RI, matrices, ends, first)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy_RO,) = grads
        x_RI, ends, *matrices = ctx.saved_tensors
        if ctx.needs_input_grad[4]:
            ctx.operands.append(Operands(x_RI, dy_RO, ends, ctx.first, ctx.counts))
        return rows_gradient(dy_RO, matrices, ends, ctx.first), None, None, None, *(None for _ in matrices)


def rows_product(x_RI: Tensor, matrices: Sequence[Tensor], ends: Tensor, first: int) -> Tensor:
    """Multiply rows by the matrix of their expert: [R, O]."""
    return npu_gmm(x_RI, _of_experts(matrices, first, len(ends)), group_list=ends)


def rows_gradient(dy_RO: Tensor, matrices: Sequence[Tensor], ends: Tensor, first: int) -> Tensor:
    """Multiply gradients of results by the transposed matrix of their expert: [R, I]."""
    return rows_product(dy_RO, [matrix.transpose(-2, -1) for matrix in matrices], ends, first)


def _of_experts(matrices: Sequence[Tensor], first: int, count: int) -> Tensor | Sequence[Tensor]:
    """Select the matrices of some experts, from one tensor or from a tensor of each expert."""
    if matrices[0].dim() == 3:
        return matrices[0][first : first + count]
    return matrices[first : first + count]
