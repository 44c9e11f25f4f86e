"""Experts of a call part by part, between transfers that are under way.

All parts are sent before the first is waited for; weights enter the graph there, so that their gradients are computed while the
gradients of rows travel back. What a part gives is sent back before the next part is computed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from mindspeed.moe.alltoall import AllToAllCall
from mindspeed.moe.transfer import TokenTransfer, arrived, post, wait
from mindspeed.ops.process_groups import PendingCollective, post_all_to_all


class InFlight(NamedTuple):
    """A tensor that was posted, and its transfer."""

    received: Tensor
    transfer: TokenTransfer

    def wait(self) -> Tensor:
        return wait(self.received, self.transfer)


def send(rows: Tensor, transfer: TokenTransfer) -> InFlight:
    """Post rows."""
    return InFlight(post(rows, transfer), transfer)


@dataclass(slots=True)
class Redispatch:
    """Send the tokens of a part to their experts once more, in backward: ``source`` [T, H] is the input of the layer."""

    call: AllToAllCall
    part: int
    source: Tensor
    _pending: PendingCollective | None = None

    def start(self) -> None:
        """Post the transfer, unless it is under way."""
        if self._pending is None:
            splits = self.call.on_host[self.part]
            token_R = self.call.parts_of(self.call.token_R)[self.part]
            with torch.no_grad():
                rows = self.source.index_select(0, token_R)
            self._pending = post_all_to_all(self.call.place.group, rows, splits.sent, splits.received)

    def rows(self) -> Tensor:
        """Wait for the rows, in the order of experts."""
        self.start()
        pending, self._pending = self._pending, None
        with torch.no_grad():
            return self.call.arrange(arrived(pending), self.part)  # type: ignore[arg-type]


@runtime_checkable
class ExpertCall(Protocol):
    """Replace the counts of rows that experts get: the experts call it for their outputs."""

    def answer(self, experts: Any) -> Tensor:
        """Return the outputs of grouped experts, or a placeholder for them."""


@dataclass(slots=True)
class OverlappedCall(ExpertCall):
    """Stand in for the counts that experts get: what their dispatcher has posted for them, and what they have sent back.

    ``source`` is the input of the layer, detached, and ``dtype`` that in which answers of tensor ranks are summed.
    """

    call: AllToAllCall
    source: Tensor
    dtype: torch.dtype
    sent: list[tuple[InFlight, InFlight]] = field(default_factory=list)
    returned: list[InFlight] = field(default_factory=list)

    def post(self, rows: Tensor, probs: Tensor) -> Tensor:
        """Send the rows and probabilities of every chunk; the result is a placeholder for them until `answer`."""
        call = self.call
        for part, (rows_of_part, probs_of_part) in enumerate(zip(call.parts_of(rows), call.parts_of(probs), strict=True)):
            self.sent.append((send(rows_of_part, call.dispatch(part)), send(probs_of_part, call.dispatch(part))))
        return self.sent[0][0].received

    def answer(self, experts: Any) -> Tensor:
        """Compute the experts of every chunk and send their outputs back; the result is a placeholder until `collect`."""
        call, size = self.call, self.call.place.part_size
        weights = experts.weights()
        sent, self.sent = self.sent, []
        for part, (rows, probs) in enumerate(sent):
            again = Redispatch(call, part, self.source)
            arrived = cache(lambda probs=probs, part=part: call.arrange_probabilities(probs.wait(), part))
            if call.probabilities_first:
                arrived()
            x, ends = call.arrange(rows.wait(), part), call.expert_counts(part).cumsum(0)
            answers = experts.products(x, arrived, ends, weights, part * size, again)
            back = call.combine(part)
            received = post(call.disarrange(answers, part, self.dtype), back)
            self.returned.append(InFlight(experts.before_backward(received, again), back))
        return self.returned[0].received

    def collect(self) -> Tensor:
        """Wait for the outputs: a row for each sent row."""
        returned, self.returned = self.returned, []
        arrived = [answers.wait() for answers in returned]
        return torch.cat(arrived) if len(arrived) > 1 else arrived[0]
