"""Products of experts whose backward pass computes the activations again, from rows that are sent once more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mindspeed.memory.recomputation import recomputation
from mindspeed.moe.overlap import Redispatch
from mindspeed.moe.products import Counts, Operands, Weight, rows_gradient, rows_product

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
    counts: Counts | None
    rows: Tensor | None = None

    def multiply(self, rows: Tensor, matrices: Sequence[Tensor]) -> Tensor:
        return rows_product(rows, matrices, self.ends, self.first)

    def gradient(self, dy: Tensor, matrices: Sequence[Tensor]) -> Tensor:
        return rows_gradient(dy, matrices, self.ends, self.first)

    def leave(self, weight: int, x: Tensor | Callable[[], Tensor], dy: Tensor) -> None:
        self.weights[weight].operands.append(Operands(x, dy, self.ends, self.first, self.counts))


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
    shared = _Backward(weights, ends, first, again, activate, keeps_first, weights[0].counts(ends))
    h = _First.apply(x_RH, shared, *weights[0].matrices)  # type: ignore[no-untyped-call]
    matrices = *weights[0].matrices, *weights[1].matrices
    y_RH: Tensor = _Second.apply(h, probs(), shared, *matrices)  # type: ignore[no-untyped-call]
    return y_RH


class _First(torch.autograd.Function):
    """The first product. Its rows are not kept: they are sent here again under the gradient of the rows."""

    @staticmethod
    def forward(ctx: Any, x_RH: Tensor, shared: _Backward, *matrices: Tensor) -> Tensor:
        ctx.shared = shared
        ctx.save_for_backward(*matrices)
        return shared.multiply(x_RH, matrices)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dh,), shared = grads, ctx.shared
        if shared.keeps_first:
            shared.again.start()
            shared.leave(0, shared.again.rows, dh)
        else:
            shared.leave(0, shared.rows, dh)
            shared.rows = None
        matrices = ctx.saved_tensors
        return shared.gradient(dh, matrices), None, *(None for _ in matrices)


class _Second(torch.autograd.Function):
    """Activation and second product. The activation is computed again, and the first product where it was not kept."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, probs_R: Tensor, shared: _Backward, *matrices: Tensor) -> Tensor:
        """``matrices`` are those of the first product, and as many of the second."""
        ctx.shared = shared
        ctx.save_for_backward(h if shared.keeps_first else None, probs_R, *matrices)
        return shared.multiply(shared.activate(h, probs_R.unsqueeze(-1)), matrices[len(matrices) // 2 :])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,), shared = grads, ctx.shared
        h, probs_R, *matrices = ctx.saved_tensors
        matrices1, matrices2 = matrices[: len(matrices) // 2], matrices[len(matrices) // 2 :]
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
        return dh, dprobs, None, *(None for _ in matrices)


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
