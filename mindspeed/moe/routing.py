"""Rows of tokens by expert, on the device alone: no length is read back.

T tokens, E experts, R rows (one per token and expert that it goes to, expert after expert), S ranks that send.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


def positions_of(routing_map_TE: Tensor, rows: int) -> Tensor:
    """Give the position [R] of each row in the transposed map: expert times T plus token. ``rows`` is how many are set."""
    flat = routing_map_TE.t().reshape(-1)
    place = torch.where(flat, flat.cumsum(0) - 1, rows)
    everything = torch.arange(flat.shape[0], device=flat.device)
    return everything.new_zeros(rows + 1).scatter_(0, place, everything)[:rows]


def padded_positions(routing_map_TE: Tensor, capacity: int) -> Tensor:
    """The same where every expert gets ``capacity`` rows: its tokens in order, then others, whose probability is zero."""
    chosen = routing_map_TE.t().to(torch.int8).argsort(dim=-1, descending=True, stable=True)[:, :capacity]
    starts = torch.arange(chosen.shape[0], device=chosen.device).unsqueeze(1) * routing_map_TE.shape[0]
    return (chosen + starts).reshape(-1)


def probabilities_of(probs_TE: Tensor, positions: Tensor) -> Tensor:
    """The probability [R] of each row."""
    return probs_TE.t().reshape(-1).index_select(0, positions)


@dataclass(eq=False)
class RowIndex:
    """Say which token each row is of, by the map [T, E] and the positions [R] of its rows.

    A token has at most ``topk`` rows, or any number where that is None. ``slot_TK`` are the rows of each token where an
    operator has found them, indices from R on being none.
    """

    map_TE: Tensor  # noqa: N815 - named by its shape
    positions: Tensor
    topk: int | None
    slot_TK: Tensor | None = None  # noqa: N815

    @property
    def tokens(self) -> int:
        """T."""
        return self.map_TE.shape[0]

    @cached_property
    def token_R(self) -> Tensor:  # noqa: N802 - named by its shape
        """Token of each row."""
        return self.positions % max(1, self.tokens)

    def expert_TK(self, topk: int) -> Tensor:  # noqa: N802
        """The experts of each token in ascending order, E where it has fewer."""
        experts = self.map_TE.shape[1]
        expert_TK = expert_indices(self.map_TE, min(topk, experts))
        return torch.where(expert_TK < 0, experts, expert_TK)


def take_rows(x_TH: Tensor, index: RowIndex) -> Tensor:
    """The rows [R, H] of tokens, each copied as often as it has rows."""
    return x_TH.index_select(0, index.token_R)


def sum_rows(rows_RH: Tensor, index: RowIndex) -> Tensor:
    """Sum the rows of each token: [T, H], in the order of the rows."""
    empty = torch.zeros((index.tokens, rows_RH.shape[1]), dtype=rows_RH.dtype, device=rows_RH.device)
    return empty.scatter_add(0, index.token_R.unsqueeze(1).expand(-1, rows_RH.shape[1]), rows_RH)


def chunk_order(counts_SE: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Indices that bring chunks, by sending rank and then expert, into the order of experts, and those that bring them back."""
    sizes, by_expert = counts_SE.reshape(-1), counts_SE.t().reshape(-1)
    starts = (sizes.cumsum(0) - sizes).view_as(counts_SE)
    new_starts = (by_expert.cumsum(0) - by_expert).view(counts_SE.shape[1], -1)
    everything = torch.arange(rows, device=counts_SE.device)
    moves = torch.repeat_interleave((starts.t() - new_starts).reshape(-1), by_expert, output_size=rows)
    returns = torch.repeat_interleave((new_starts.t() - starts).reshape(-1), sizes, output_size=rows)
    return everything + moves, everything + returns


def reorder(rows: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
    """Select rows by a permutation, whose inverse backward takes."""
    ordered: Tensor = _Reorder.apply(rows, index, inverse)  # type: ignore[no-untyped-call]
    return ordered


class _Reorder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.inverse = inverse
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].index_select(0, ctx.inverse), None, None


def expert_indices(routing_map_TE: Tensor, topk: int) -> Tensor:
    """The experts [T, k] of each token in ascending order, -1 where it has fewer."""
    tokens, experts = routing_map_TE.shape
    place = torch.where(routing_map_TE, routing_map_TE.cumsum(1) - 1, topk)
    numbers = torch.arange(experts, device=place.device).expand(tokens, -1)
    return place.new_full((tokens, topk + 1), -1).scatter_(1, place, numbers)[:, :topk]


def local_choices(indices_TK: Tensor, first: int, experts: int) -> tuple[Tensor, Tensor]:
    """The map [T, experts] of the experts from ``first`` on, and for each choice its column there, ``experts`` if elsewhere."""
    column_TK = torch.where((indices_TK >= first) & (indices_TK < first + experts), indices_TK - first, experts)
    chosen = torch.zeros((indices_TK.shape[0], experts + 1), dtype=torch.bool, device=indices_TK.device)
    return chosen.scatter_(1, column_TK, True)[:, :experts], column_TK
