"""The up-projections of latent attention, each product in the tensor that attention reads. Plain torch.

R rows of this rank's latent vectors, T rows of its heads' queries, keys and values. They differ under sequence parallelism,
where a latent vector is gathered before its product. Leading sizes are free: ``[T, ...]`` is [sequence, batch] or [tokens].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed.ops.process_groups import PendingCollective, post_all_gather, post_all_reduce, post_reduce_scatter
from mindspeed.tensor_parallel.linear import WeightGradient, gathered_gradients, replicated


@dataclass(frozen=True, slots=True)
class HeadWidths:
    """Heads of a rank, and widths of a key without its rotary part, of that part, and of a value."""

    heads: int
    key: int
    rope: int
    value: int


class LatentExchange:
    """The latent vectors of one projection over tensor-parallel ranks.

    Under sequence parallelism their gather is posted at once, and waited for when their product begins.
    """

    def __init__(self, group: dist.ProcessGroup | None, x: Tensor, sequence_parallel: bool) -> None:
        self.group = group if group is not None and group.size() > 1 else None
        self.gathers = sequence_parallel and self.group is not None
        self._pending = post_all_gather(self.group, x.detach()) if self.gathers and self.group is not None else None

    def gathered(self, x: Tensor) -> Tensor:
        """Return ``x`` of all ranks, without keeping it."""
        pending, self._pending = self._pending, None
        return x if pending is None else pending.wait()

    def gradients(
        self, g_TN: Tensor, x_RK: Tensor, weight_NK: Tensor, weight_gradient: WeightGradient | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the gradients of the latent vectors [R, K] and of the weight, whose product overlaps with the transfer."""
        if self.gathers and self.group is not None:
            if weight_gradient is None:
                return post_reduce_scatter(self.group, g_TN.matmul(weight_NK)).wait(), None
            return gathered_gradients(g_TN, x_RK, weight_NK, self.group, weight_gradient)
        g_x = g_TN.matmul(weight_NK)
        pending = PendingCollective(g_x) if self.group is None else post_all_reduce(self.group, g_x)
        g_weight = None if weight_gradient is None else weight_gradient(g_TN, x_RK)
        return pending.wait(), g_weight


class _Queries(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, exchange: LatentExchange, weight_gradient: WeightGradient) -> Tensor:
        ctx.exchange, ctx.weight_gradient = exchange, weight_gradient
        ctx.save_for_backward(x, weight)
        return exchange.gathered(x).matmul(weight.t())

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        make = ctx.weight_gradient if ctx.needs_input_grad[1] else None
        g_x, g_weight = ctx.exchange.gradients(_rows(g), _rows(x), weight, make)
        return g_x.view(x.shape), g_weight, None, None


class _KeysAndValues(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        positions: Tensor,
        weight: Tensor,
        widths: HeadWidths,
        exchange: LatentExchange,
        weight_gradient: WeightGradient,
    ) -> tuple[Tensor, Tensor]:
        ctx.widths, ctx.exchange, ctx.weight_gradient = widths, exchange, weight_gradient
        ctx.save_for_backward(x, weight)
        whole = exchange.gathered(x)
        rows = weight.view(widths.heads, widths.key + widths.value, -1)
        of_keys, of_values = (part.flatten(0, 1) for part in (rows[:, : widths.key], rows[:, widths.key :]))
        heads = (*whole.shape[:-1], widths.heads)
        key = whole.new_empty(*heads, widths.key + widths.rope)
        key[..., : widths.key] = whole.matmul(of_keys.t()).view(*heads, widths.key)
        key[..., widths.key :] = positions
        return key, whole.matmul(of_values.t()).view(*heads, widths.value)

    @staticmethod
    def backward(ctx: Any, g_key: Tensor, g_value: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        g_positions = g_key[..., ctx.widths.key :].sum(-2, keepdim=True) if ctx.needs_input_grad[1] else None
        g = torch.cat([g_key[..., : ctx.widths.key], g_value], dim=-1)
        make = ctx.weight_gradient if ctx.needs_input_grad[2] else None
        g_x, g_weight = ctx.exchange.gradients(g.reshape(-1, weight.shape[0]), _rows(x), weight, make)
        return g_x.view(x.shape), g_positions, g_weight, None, None, None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: LatentExchange) -> Tensor:
        ctx.group = exchange.group
        return exchange.gathered(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return post_reduce_scatter(ctx.group, g).wait(), None


def queries(x: Tensor, weight: Tensor, exchange: LatentExchange, weight_gradient: WeightGradient) -> Tensor:
    """Return the queries [T, ..., heads x width] of latent vectors [R, ..., K]."""
    made: Tensor = _Queries.apply(x, weight, exchange, weight_gradient)  # type: ignore[no-untyped-call]
    return made


def keys_and_values(
    x: Tensor,
    positions: Tensor,
    weight: Tensor,
    widths: HeadWidths,
    exchange: LatentExchange,
    weight_gradient: WeightGradient,
) -> tuple[Tensor, Tensor]:
    """Return keys [T, ..., heads, key + rope] and values [T, ..., heads, value] of latent vectors [R, ..., K].

    ``weight`` [heads x (key + value), K] has Megatron's order of rows; ``positions`` [T, ..., 1, rope] is the rotary part that
    all heads share. Each product is computed from the rows of its own, so that values are not copied out of a common product.
    """
    made: tuple[Tensor, Tensor] = _KeysAndValues.apply(x, positions, weight, widths, exchange, weight_gradient)  # type: ignore[no-untyped-call]
    return made


def of_all_ranks(x: Tensor, exchange: LatentExchange) -> Tensor:
    """Return the rows of all ranks; the gradient of a rank's own rows is summed over the ranks."""
    if exchange.gathers:
        made: Tensor = _Gathered.apply(x, exchange)  # type: ignore[no-untyped-call]
        return made
    return x if exchange.group is None else replicated(x, exchange.group)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])
