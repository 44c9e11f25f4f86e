"""Experts that keep less for backward: what is missing is computed again there, from rows that are sent here once more.

R rows, H hidden size, F size of an activation. `keep_first` keeps the first product and the probabilities; `keep_nothing` keeps
the probabilities alone. Nothing is freed and refilled: what backward makes itself is never saved.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mindspeed.memory.recomputation import recomputation
from mindspeed.moe.overlap import Redispatch
from mindspeed.moe.products import Operands, Weight, rows_gradient
from mindspeed.ops.npu_gmm import npu_gmm

Activate = Callable[[Tensor, Tensor], Tensor]
"""The activation [R, F] of a first product, weighed by the probabilities [R, 1]."""


@dataclass(slots=True)
class _Backward:
    """Data that both nodes of one call share in backward: operands of weight gradients, and the rows sent again."""

    weights: tuple[Weight, Weight]
    ends: Tensor
    first: int
    again: Redispatch
    activate: Activate
    keeps_first: bool
    rows: Tensor | None = None

    def multiply(self, rows: Tensor, matrices: Tensor) -> Tensor:
        return npu_gmm(rows, matrices[self.first : self.first + len(self.ends)], group_list=self.ends)

    def gradient(self, dy: Tensor, matrices: Tensor) -> Tensor:
        return rows_gradient(dy, matrices, self.ends, self.first)

    def leave(self, weight: int, x: Tensor | Callable[[], Tensor], dy: Tensor) -> None:
        self.weights[weight].operands.append(Operands(x, dy, self.ends, self.first))


def answers(
    x_RH: Tensor,
    probs: Callable[[], Tensor],
    ends: Tensor,
    weights: tuple[Weight, Weight],
    first: int,
    again: Redispatch,
    activate: Activate,
    keeps_first: bool,
) -> Tensor:
    """Return the outputs [R, H] of experts; with ``keeps_first`` the first product is kept, else only the probabilities."""
    shared = _Backward(weights, ends, first, again, activate, keeps_first)
    h = _First.apply(x_RH, weights[0].matrices, shared)  # type: ignore[no-untyped-call]
    y_RH: Tensor = _Second.apply(h, probs(), weights[0].matrices, weights[1].matrices, shared)  # type: ignore[no-untyped-call]
    return y_RH


class _First(torch.autograd.Function):
    """The first product. Its rows are not kept: they are sent here again under the gradient of the rows."""

    @staticmethod
    def forward(ctx: Any, x_RH: Tensor, matrices: Tensor, shared: _Backward) -> Tensor:
        ctx.shared = shared
        ctx.save_for_backward(matrices)
        return shared.multiply(x_RH, matrices)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (dh,), shared = grads, ctx.shared
        if shared.keeps_first:
            shared.again.start()
            shared.leave(0, shared.again.rows, dh)
        else:
            shared.leave(0, shared.rows, dh)
            shared.rows = None
        return shared.gradient(dh, ctx.saved_tensors[0]), None, None


class _Second(torch.autograd.Function):
    """Activation and second product. The activation is computed again, and the first product where it was not kept."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, probs_R: Tensor, matrices1: Tensor, matrices2: Tensor, shared: _Backward) -> Tensor:
        ctx.shared = shared
        ctx.save_for_backward(h if shared.keeps_first else None, probs_R, matrices1, matrices2)
        return shared.multiply(shared.activate(h, probs_R.unsqueeze(-1)), matrices2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        (dy,), shared = grads, ctx.shared
        h, probs_R, matrices1, matrices2 = ctx.saved_tensors
        if h is None:
            shared.rows = shared.again.rows()
            with recomputation():
                h = shared.multiply(shared.rows, matrices1)
        inputs = h.detach().requires_grad_(), probs_R.detach().requires_grad_(ctx.needs_input_grad[1])
        with torch.enable_grad():
            active = shared.activate(inputs[0], inputs[1].unsqueeze(-1))
        shared.leave(1, active.detach(), dy)
        da = shared.gradient(dy, matrices2)
        dh, dprobs = torch.autograd.grad(active, inputs, da, allow_unused=True)
        return dh, dprobs, None, None, None


def do_first(rows: Tensor, action: Callable[[], None]) -> Tensor:
    """Return ``rows``; backward runs ``action`` as soon as it comes here."""
    same: Tensor = _DoFirst.apply(rows, action)  # type: ignore[no-untyped-call]
    return same


class _DoFirst(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, action: Callable[[], None]) -> Tensor:
        ctx.action = action
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.action()
        return grads[0], None
