"""Tokens to the ranks of their experts and back by all-to-all: the routing and the transfers of one call.

T tokens, E experts of all ranks, H hidden size, R rows, P parts into which the experts of a rank are cut. Rows stand part after
part, in a part rank after rank, for a rank expert after expert. Autograd holds a call, not a module: micro-batches in
flight, recomputation and exceptions cannot mix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed.moe.routing import (
    RowIndex,
    chunk_order,
    padded_positions,
    positions_of,
    probabilities_of,
    reorder,
    sum_rows,
    take_rows,
)
from mindspeed.moe.transfer import TokenTransfer, all_to_all
from mindspeed.ops.process_groups import PendingCollective, post_all_gather
from mindspeed.platforms.host_copy import HostCopy

TensorRanks = Callable[[Tensor, list[int]], Tensor]
"""Gather the rows of the ranks that share an expert, or sum them and keep this rank's; with the rows of each rank."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Experts over ranks: ``ranks`` x ``tensor_ranks`` ranks in ``everyone``, of which ``group`` has one of each tensor rank.

    ``rank`` and ``tensor_rank`` are this rank's places. Tensor ranks share the experts of a rank and have other tokens.
    """

    experts: int
    group: dist.ProcessGroup
    rank: int
    ranks: int
    everyone: dist.ProcessGroup
    tensor_rank: int = 0
    tensor_ranks: int = 1
    gather: TensorRanks | None = None
    scatter: TensorRanks | None = None
    parts: int = 1

    @property
    def part_size(self) -> int:
        """Experts of a rank in one part."""
        return self.experts // self.ranks // self.parts

    def by_part(self, numbers: Tensor) -> Tensor:
        """View the last dimension, of experts in the order of rows, as [parts, ranks, experts of a part]."""
        return numbers.view(*numbers.shape[:-1], self.parts, self.ranks, self.part_size)

    def in_rows(self, by_expert: Tensor) -> Tensor:
        """Bring the last dimension from the order of expert numbers into that of rows."""
        if self.parts == 1:
            return by_expert
        cut = by_expert.view(*by_expert.shape[:-1], self.ranks, self.parts, self.part_size)
        return cut.transpose(-3, -2).reshape(by_expert.shape)


class Splits(NamedTuple):
    """Rows of one part: sent to each rank, received from each, and after the gather of each tensor rank."""

    sent: list[int]
    received: list[int]
    tensor: list[int]


class AllToAllCall:
    """The routing of one call. The counts of all ranks are on their way from the beginning, also to a host that needs them."""

    probabilities_first = False
    """True where `arrange_probabilities` tells `arrange` what to do."""

    def __init__(
        self, place: Placement, routing_map_TE: Tensor, topk: int, rows: int | None = None, capacity: int | None = None
    ) -> None:
        """A token has at most ``topk`` experts. ``rows`` are given where they do not depend on the routing, ``capacity`` where
        experts are padded to it."""
        self.place, self.tokens, self.topk, self.capacity = place, routing_map_TE.shape[0], topk, capacity
        self._map = place.in_rows(routing_map_TE)
        counts = self._map.sum(0) if capacity is None else torch.full_like(self._map[0], capacity, dtype=torch.int64)
        self._rows = place.experts * capacity if capacity is not None else rows
        alone = place.ranks * place.tensor_ranks == 1 or capacity is not None
        sources = place.ranks * place.tensor_ranks
        repeated = counts.expand(sources, -1).reshape(-1) if alone else counts
        gathered = PendingCollective(repeated) if alone else post_all_gather(place.everyone, counts)
        self._known = self._known_splits()
        self._gathered = HostCopy(gathered.wait, posted=self._known is None)

    @cached_property
    def counts(self) -> Tensor:
        """Rows [tensor rank, rank, part, rank of the expert, expert] that each rank sends, on the device."""
        return self._by_rank(self._gathered.on_device())

    def _by_rank(self, gathered: Tensor) -> Tensor:
        place = self.place
        return place.by_part(gathered.view(place.ranks, place.tensor_ranks, place.experts).transpose(0, 1))

    @cached_property
    def on_host(self) -> list[Splits]:
        """The splits of every part: the one read of a call, none where every number is known."""
        if self._known is not None:
            return self._known
        place = self.place
        host = self._by_rank(self._gathered.wait()).sum(-1)
        return [
            Splits(
                host[place.tensor_rank, place.rank, part].tolist(),
                host[place.tensor_rank, :, part, place.rank].tolist(),
                host[:, :, part, place.rank].sum(1).tolist(),
            )
            for part in range(place.parts)
        ]

    def _known_splits(self) -> list[Splits] | None:
        """Return the splits where they do not depend on the routing."""
        place = self.place
        if self.capacity is not None:
            size = self.capacity * place.part_size
            one = Splits([size] * place.ranks, [size] * place.ranks, [size * place.ranks] * place.tensor_ranks)
            return [one] * place.parts
        if place.ranks * place.tensor_ranks == 1 and self._rows is not None and place.parts == 1:
            return [Splits([self._rows], [self._rows], [self._rows])]
        return None

    @cached_property
    def positions(self) -> Tensor:
        """Place of each row in the transposed map."""
        if self.capacity is not None:
            return padded_positions(self._map, self.capacity)
        rows = self._rows if self._rows is not None else sum(sum(splits.sent) for splits in self.on_host)
        return positions_of(self._map, rows)

    @cached_property
    def index(self) -> RowIndex:
        """The rows of each token; padding gives a token any number."""
        return RowIndex(self._map, self.positions, self.topk if self.capacity is None else None)

    @cached_property
    def token_R(self) -> Tensor:  # noqa: N802 - named by its shape
        """Token of each row."""
        return self.index.token_R

    def permute(self, x_TH: Tensor) -> Tensor:
        """The rows [R, H] of tokens."""
        return take_rows(x_TH, self.index)

    def permute_probabilities(self, probs_TE: Tensor) -> Tensor:
        """The probability [R] of each row."""
        return probabilities_of(self.place.in_rows(probs_TE), self.positions)

    def unpermute(self, rows_RH: Tensor) -> Tensor:
        """Sum the rows of each token: [T, H]."""
        return sum_rows(rows_RH, self.index)

    def parts_of(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Cut rows into parts."""
        sizes = [sum(splits.sent) for splits in self.on_host] if self.place.parts > 1 else [len(rows)]
        return torch.split(rows, sizes)

    def dispatch(self, part: int) -> TokenTransfer:
        """The transfer of a part's rows to the ranks of their experts."""
        splits = self.on_host[part]
        return all_to_all(self.place.group, splits.sent, splits.received)

    def combine(self, part: int) -> TokenTransfer:
        """The transfer of a part's results back."""
        splits = self.on_host[part]
        return all_to_all(self.place.group, splits.received, splits.sent)

    def arrange(self, received: Tensor, part: int) -> Tensor:
        """Bring what a part received into the order of its experts, with the rows of every tensor rank."""
        if self.place.gather is not None:
            received = self.place.gather(received, self.on_host[part].tensor)
        return received if self.place.part_size == 1 else reorder(received, *self._orders[part])

    def arrange_probabilities(self, received: Tensor, part: int) -> Tensor:
        """Bring the probabilities that a part received into the order of its experts."""
        return self.arrange(received, part)

    def disarrange(self, answers: Tensor, part: int, dtype: torch.dtype) -> Tensor:
        """Return outputs in the order that `combine` sends, summed over tensor ranks in ``dtype``."""
        if self.place.part_size > 1:
            index, inverse = self._orders[part]
            answers = reorder(answers, inverse, index)
        if self.place.scatter is not None:
            answers = self.place.scatter(answers.to(dtype), self.on_host[part].tensor).to(answers.dtype)
        return answers

    def expert_counts(self, part: int) -> Tensor:
        """Rows [expert] of the experts of a part on this rank, on the device."""
        return self._of_part(part).sum((0, 1))

    def forget(self) -> None:
        """Drop what forward alone needs: backward keeps a call that sends rows again, and for that `token_R`."""
        self.token_R  # noqa: B018
        for name in ("_map", "_chosen", "_gathered", "counts", "positions", "index"):
            self.__dict__.pop(name, None)

    def _of_part(self, part: int) -> Tensor:
        return self.counts[:, :, part, self.place.rank]

    @cached_property
    def _orders(self) -> list[tuple[Tensor, Tensor]]:
        rows = [sum(splits.tensor) for splits in self.on_host]
        size = self.place.part_size
        return [chunk_order(self._of_part(part).reshape(-1, size), rows[part]) for part in range(self.place.parts)]
