"""Tokens of all ranks to every rank and sums of outputs back: the routing and the transfers of one call.

T tokens of a rank, N of all ranks, K experts of a token, E experts of this rank, H hidden size, R rows. Experts and
probabilities travel as K numbers per token, not as one for each expert there is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed.moe.overlap import ExpertCall, InFlight, send
from mindspeed.moe.routing import RowIndex, expert_indices, local_choices, positions_of, probabilities_of, sum_rows, take_rows
from mindspeed.moe.transfer import all_gather, reduce_scatter
from mindspeed.ops.process_groups import PendingCollective, post_all_gather


class AllGatherCall:
    """The routing of one call. The indices of all ranks are on their way from the beginning."""

    def __init__(
        self, group: dist.ProcessGroup, first: int, experts: int, routing_map: Tensor, topk: int, rows: int | None = None
    ) -> None:
        """This rank has ``experts`` experts from ``first`` on; ``rows`` are given where they do not depend on the routing."""
        self.group, self.first, self.experts, self._rows = group, first, experts, rows
        self._chosen_TK = expert_indices(routing_map, topk)
        indices = self._chosen_TK.to(torch.int32)
        self.alone = group.size() == 1
        self._gathered = PendingCollective(indices) if self.alone else post_all_gather(group, indices)

    def choose(self, probs: Tensor) -> Tensor:
        """The probabilities [T, K] of the chosen experts, 0 where a token has fewer."""
        chosen = probs.gather(1, self._chosen_TK.clamp(min=0))
        return chosen * (self._chosen_TK >= 0)

    @cached_property
    def _local(self) -> tuple[Tensor, Tensor]:
        return local_choices(self._gathered.wait().long(), self.first, self.experts)

    @cached_property
    def counts(self) -> Tensor:
        """Rows [E] of the experts of this rank, on the device."""
        return self._local[0].sum(0)

    @cached_property
    def positions(self) -> Tensor:
        """Place of each row in the transposed map of this rank's experts; its length is the one read of a call."""
        rows = self._rows if self._rows is not None else int(self.counts.to("cpu").sum())
        return positions_of(self._local[0], rows)

    @cached_property
    def index(self) -> RowIndex:
        """The rows of each token, among those of all ranks."""
        return RowIndex(self._local[0], self.positions, self._chosen_TK.shape[1])

    def permute(self, tokens: Tensor) -> Tensor:
        """The rows [R, H] of the tokens [N, H] of all ranks."""
        return take_rows(tokens, self.index)

    def permute_probabilities(self, probs_NK: Tensor) -> Tensor:
        """The probability [R] of each row."""
        local, column_NK = self._local
        spread = torch.zeros((len(local), self.experts + 1), dtype=probs_NK.dtype, device=probs_NK.device)
        return probabilities_of(spread.scatter(1, column_NK, probs_NK)[:, : self.experts], self.positions)

    def unpermute(self, answers: Tensor) -> Tensor:
        """Sum the expert outputs of each token: [N, H]."""
        return sum_rows(answers, self.index)

    def gather(self, rows: Tensor) -> InFlight:
        """Post rows of this rank to all."""
        return send(rows, all_gather(self.group))

    def scatter(self, rows: Tensor) -> InFlight:
        """Post sums for every rank."""
        return send(rows, reduce_scatter(self.group))


@dataclass(slots=True)
class GatheredCall(ExpertCall):
    """Stand in for the counts that experts get: what their dispatcher has posted for them."""

    call: AllGatherCall
    tokens: Callable[[], Tensor]
    probs: Callable[[], Tensor]

    def answer(self, experts: Any) -> Tensor:
        """Wait for tokens and probabilities, and return the outputs of each row."""
        call, weights = self.call, experts.weights()
        call.positions  # noqa: B018 - the read of its length waits for the indices, which travel before the tokens
        rows, ends = call.permute(self.tokens()), call.counts.cumsum(0)
        answers: Tensor = experts.products(rows, lambda: call.permute_probabilities(self.probs()), ends, weights)
        return answers
