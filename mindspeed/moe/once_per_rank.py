"""All-to-all that sends a token once to each rank with experts of it, and copies it for each of them there.

T tokens, E experts of all ranks, C experts of a part on one rank, H hidden size, P pairs of a token and a rank, R rows. What a
rank's experts answer to a token is summed there, so partial sums return.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from mindspeed.moe.alltoall import AllToAllCall, Placement, Splits
from mindspeed.moe.routing import positions_of, probabilities_of, sum_rows, take_rows
from mindspeed.ops.process_groups import post_all_gather


class OncePerRankCall(AllToAllCall):
    """The routing of one call. Counts of rows and of pairs are gathered as one, and read once.

    Probabilities [P, C] of all experts of a rank travel beside a token, -1 where it does not go to the expert.
    """

    probabilities_first = True

    def __init__(self, place: Placement, routing_map_TE: Tensor) -> None:
        """``place`` has no tensor ranks: these would gather pairs whose rows nobody has counted."""
        self.place, self.tokens, self.capacity = place, routing_map_TE.shape[0], None
        self._chosen = place.in_rows(routing_map_TE)
        self._map = place.by_part(self._chosen).any(-1).flatten(1)
        self._gathered = post_all_gather(place.everyone, torch.cat([self._chosen.sum(0), self._map.sum(0)]))
        self._places: dict[int, Tensor] = {}

    @cached_property
    def _numbers(self) -> Tensor:
        """Count the rows and pairs that each rank sends, [rank, E + parts x ranks]: rows to experts, then pairs."""
        return self._gathered.wait().view(self.place.ranks, -1)

    @cached_property
    def counts(self) -> Tensor:
        """Rows [1, rank, part, rank of the expert, expert] that each rank sends, on the device."""
        return self.place.by_part(self._numbers[:, : self.place.experts]).unsqueeze(0)

    @cached_property
    def _on_host(self) -> tuple[list[Splits], list[int]]:
        """The splits of every part, and the rows of this rank's experts: the one read of a call."""
        place = self.place
        host = self._numbers.to("cpu")
        rows = place.by_part(host[:, : place.experts]).sum((0, -1))[:, place.rank]
        pairs = host[:, place.experts :].view(place.ranks, place.parts, place.ranks)
        splits = []
        for part in range(place.parts):
            received = pairs[:, part, place.rank].tolist()
            splits.append(Splits(pairs[place.rank, part].tolist(), received, [sum(received)]))
        return splits, rows.tolist()

    @property
    def on_host(self) -> list[Splits]:
        """The splits of every part, in pairs."""
        return self._on_host[0]

    @cached_property
    def positions(self) -> Tensor:
        """Place of each pair in the transposed map of tokens and ranks."""
        return positions_of(self._map, sum(sum(splits.sent) for splits in self.on_host))

    def permute_probabilities(self, probs_TE: Tensor) -> Tensor:
        """The probabilities [P, C] of the experts of each pair's rank."""
        marked = torch.where(self._chosen, self.place.in_rows(probs_TE), -1)
        by_rank = marked.view(self.tokens, -1, self.place.part_size).transpose(0, 1)
        return by_rank.reshape(-1, self.place.part_size).index_select(0, self.positions)

    def arrange_probabilities(self, received: Tensor, part: int) -> Tensor:
        """The probability [R] of each row, by the order of experts; finds the rows that `arrange` copies."""
        positions = positions_of(received >= 0, self._on_host[1][part])
        self._places[part] = positions % max(1, len(received))
        return probabilities_of(received, positions)

    def arrange(self, received: Tensor, part: int) -> Tensor:
        """Copy what a part received for each of its experts: [R, H]. `arrange_probabilities` comes first."""
        return take_rows(received, self._places[part])

    def disarrange(self, answers: Tensor, part: int, dtype: torch.dtype) -> Tensor:
        """Sum the outputs of each received pair: [P, H]."""
        return sum_rows(answers, self._places[part], sum(self.on_host[part].received))
