"""Tokens to places of experts and back: a table [E, C, H] of equal shares, so that every transfer is known beforehand.

T tokens of this rank, in G groups of consecutive ones; E experts of all ranks, L of one; C places of an expert for a group;
N = G x C rows of an expert from one rank; H hidden size; P ranks with other experts, each shared by S tensor ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed.features.deepspeed_moe.gating import Routing
from mindspeed.moe.transfer import TokenTransfer, all_gather, all_to_all, post, reduce_scatter, wait
from mindspeed.ops.npu_fused_moe_token_permute import npu_fused_moe_token_permute
from mindspeed.ops.npu_fused_moe_token_unpermute import npu_fused_moe_token_unpermute


@dataclass(frozen=True, slots=True)
class ExpertRanks:
    """The ranks around a layer: ``group`` has P ranks with other experts, ``tensor_group`` the S ranks that share them.

    ``everyone`` has all P x S, whose tables have one size.
    """

    group: dist.ProcessGroup
    tensor_group: dist.ProcessGroup
    everyone: dist.ProcessGroup

    @property
    def sources(self) -> int:
        """Ranks whose rows reach an expert: P x S."""
        return self.group.size() * self.tensor_group.size()

    def post_maximum(self, number: Tensor) -> Callable[[], int]:
        """Begin to take the maximum of a number over all ranks; the result waits for it and reads it."""
        work = dist.all_reduce(number, dist.ReduceOp.MAX, group=self.everyone, async_op=True) if self.sources > 1 else None

        def read() -> int:
            if work is not None:
                work.wait()
            return int(number)

        return read

    def exchange(self, rows: int) -> TokenTransfer:
        """The all-to-all of a table of ``rows`` rows, forth or back."""
        share = rows // self.group.size()
        splits = [share] * self.group.size()
        return all_to_all(self.group, splits, splits)

    def send(self, rows: Tensor) -> Callable[[], Tensor]:
        """Begin to exchange the table with the other ranks; the result waits for what they sent."""
        return _posted(rows, self.exchange(rows.shape[0]) if self.group.size() > 1 else None)

    def gather(self, arrived: Tensor) -> Callable[[], Tensor]:
        """Begin to gather what arrived at the tensor ranks."""
        return _posted(arrived, all_gather(self.tensor_group) if self.tensor_group.size() > 1 else None)

    def scatter(self, answers: Tensor) -> Callable[[], Tensor]:
        """Begin to sum the outputs of the tensor ranks, each of which keeps those of its rows."""
        return _posted(answers, reduce_scatter(self.tensor_group) if self.tensor_group.size() > 1 else None)

    def by_expert(self, gathered: Tensor, local: int) -> Tensor:
        """Bring gathered rows of ``local`` experts one after another: [L x S x P x N, H]."""
        return _transposed(gathered, self.sources, local)

    def by_rank(self, answers: Tensor, local: int) -> Tensor:
        """Undo `by_expert`."""
        return _transposed(answers, local, self.sources)


def _posted(rows: Tensor, transfer: TokenTransfer | None) -> Callable[[], Tensor]:
    """Post rows; the result waits for what arrives, which is the rows themselves where there is no transfer."""
    return (lambda: rows) if transfer is None else partial(wait, post(rows, transfer), transfer)


def _transposed(rows: Tensor, outer: int, inner: int) -> Tensor:
    """Rows that stand by ``outer`` and ``inner`` in the order of inner and outer; not copied where one of them is 1."""
    return rows.view(outer, inner, -1, rows.shape[-1]).transpose(0, 1).reshape(rows.shape)


def dispatch_by_masks(x_TH: Tensor, routing: Routing) -> Tensor:
    """The rows [E x N, H] by a product with a mask [T, E, C]."""
    tokens_GTH = x_TH.view(routing.expert.shape[0], -1, x_TH.shape[-1])
    mask_GTEC = _mask(routing, torch.ones_like(routing.weight), x_TH.dtype)
    return torch.einsum("gtec,gth->egch", mask_GTEC, tokens_GTH).reshape(-1, x_TH.shape[-1])


def combine_by_masks(rows: Tensor, routing: Routing) -> Tensor:
    """The outputs [T, H] by a product with weights [T, E, C]."""
    groups, width = routing.expert.shape[0], rows.shape[-1]
    rows_EGCH = rows.view(routing.experts, groups, routing.capacity, width)
    weights_GTEC = _mask(routing, routing.weight, rows.dtype)
    return torch.einsum("gtec,egch->gth", weights_GTEC, rows_EGCH).reshape(-1, width)


def _mask(routing: Routing, values_GTK: Tensor, dtype: torch.dtype) -> Tensor:
    groups, tokens, _ = routing.expert.shape
    places = routing.experts * routing.capacity
    place_GTK = torch.where(routing.slot < routing.capacity, routing.expert * routing.capacity + routing.slot, places)
    flat = torch.zeros((groups, tokens, places + 1), dtype=values_GTK.dtype, device=values_GTK.device)
    filled = flat.scatter(2, place_GTK, values_GTK)[..., :places].to(dtype)
    return filled.reshape(groups, tokens, routing.experts, routing.capacity)


@dataclass(frozen=True, slots=True)
class RowOrder:
    """The token of each row [R], T where no token got the place, and the weight of each row, 0 there."""

    token: Tensor
    weight: Tensor

    @classmethod
    def of(cls, routing: Routing) -> RowOrder:
        """Turn the row of each choice into the token of each row."""
        groups, tokens, topk = routing.expert.shape
        row, rows = routing.row().flatten(), routing.rows
        everything = torch.arange(groups * tokens, device=row.device).repeat_interleave(topk)
        token_R = torch.full((rows + 1,), groups * tokens, device=row.device).scatter_(0, row, everything)
        weights = routing.weight.flatten()
        weight_R = torch.zeros((rows + 1,), dtype=weights.dtype, device=row.device).scatter(0, row, weights)
        return cls(token_R[:rows], weight_R[:rows])

    def dispatch(self, x_TH: Tensor) -> Tensor:
        """Copy tokens to their rows; rows without a token are zero."""
        with_zeros = torch.nn.functional.pad(x_TH, (0, 0, 0, 1))
        return npu_fused_moe_token_permute(with_zeros, self.token.unsqueeze(0), padded_mode=True)[0]

    def combine(self, rows: Tensor, tokens: int) -> Tensor:
        """Sum the weighted rows of each token in fp32."""
        shape = (tokens + 1, rows.shape[-1])
        summed = npu_fused_moe_token_unpermute(rows, self.token, self.weight, padded_mode=True, restore_shape=shape)
        return summed[:tokens]
