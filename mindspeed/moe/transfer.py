"""A transfer between ranks as two autograd nodes: `post` starts it, `wait` ends it, and backward does the same in reverse.

Backward of `wait` posts the reversed transfer, backward of `post` waits for it. Of the nodes that are ready, autograd runs the
one that was made last, so the order of the forward code is the schedule of backward too: what stands between the two hides
the transfer both ways.

A layer on one chunk of a micro-batch is a generator that pauses after each post (`Steps`), so that the transfers of one chunk
are under way while another is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed.ops.process_groups import PendingCollective, post_all_gather, post_all_to_all, post_reduce_scatter
from mindspeed.process.place import PLACE
from mindspeed.process.turns import hand_over

Steps = Generator[None, None, Tensor]
"""A computation that pauses after each post of a transfer, and returns its result at the end."""


def finished(steps: Steps) -> Tensor:
    """Run what is left of a computation, and give its result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: Tensor = end.value
            return result


Post = Callable[[Tensor], PendingCollective]


@dataclass(slots=True)
class TokenTransfer:
    """A transfer of one call: ``forth`` starts it, ``back`` starts that of its gradient, ``pending`` is the one in flight."""

    forth: Post
    back: Post
    pending: PendingCollective | None = None
    name: str = field(default_factory=PLACE.next_transfer)


def post(sent: Tensor, transfer: TokenTransfer) -> Tensor:
    """Start a transfer. The result has the shape of what is received, and is for `wait` alone."""
    received: Tensor = _Post.apply(sent, transfer)  # type: ignore[no-untyped-call]
    return received


def wait(received: Tensor, transfer: TokenTransfer) -> Tensor:
    """Return what a transfer received, after waiting for it."""
    arrived: Tensor = _Wait.apply(received, transfer)  # type: ignore[no-untyped-call]
    return arrived


def arrived(pending: PendingCollective) -> Tensor:
    """Return what is received, after the pass of another micro-batch had its turn, and then after waiting."""
    hand_over()
    return pending.wait()


def all_to_all(
    group: dist.ProcessGroup, sent: Sequence[int] | None = None, received: Sequence[int] | None = None
) -> TokenTransfer:
    """Send ``sent[r]`` rows to rank r of the group, and receive ``received[r]`` from it; equally many if not given."""
    return TokenTransfer(
        lambda rows: post_all_to_all(group, rows, sent, received), lambda rows: post_all_to_all(group, rows, received, sent)
    )


def all_gather(group: dist.ProcessGroup) -> TokenTransfer:
    """Receive the rows of all ranks, in order of rank; gradients of rows are summed over the ranks."""
    return TokenTransfer(lambda rows: post_all_gather(group, rows), lambda rows: post_reduce_scatter(group, rows))


def reduce_scatter(group: dist.ProcessGroup) -> TokenTransfer:
    """Receive this rank's share of the rows, summed over the ranks."""
    return TokenTransfer(lambda rows: post_reduce_scatter(group, rows), lambda rows: post_all_gather(group, rows))


class _Post(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sent: Tensor, transfer: TokenTransfer) -> Tensor:
        ctx.transfer = transfer
        transfer.pending = transfer.forth(sent)
        return transfer.pending.received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        pending, ctx.transfer.pending = ctx.transfer.pending, None
        received = arrived(pending)
        PLACE.done = f"after the gradient of {ctx.transfer.name} was received"
        return received, None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, received: Tensor, transfer: TokenTransfer) -> Tensor:
        ctx.transfer = transfer
        if transfer.pending is not None:
            arrived(transfer.pending)
            transfer.pending = None
        return received.view_as(received)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.transfer.pending = ctx.transfer.back(grads[0])
        PLACE.done = f"after the gradient of {ctx.transfer.name} was sent"
        return grads[0], None  # of the shape that autograd expects; what arrives goes to the other node by the transfer
