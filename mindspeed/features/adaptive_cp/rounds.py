"""Running a schedule: what a round needs is posted a round ahead, what it gives travels during the next."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed.features.adaptive_cp.schedule import Block, Round

Tensors = list[Tensor]


class BlockMessage(NamedTuple):
    """Tensors on their way for a block; on the target they are room to receive into."""

    block: Block
    source: int
    target: int
    tensors: Tensors


@dataclass(frozen=True, slots=True)
class Work:
    """The functions by which a rank handles blocks that it does not compute alone.

    ``given(block)`` are this rank's tensors of the kind that travel for a block, ``compute(block, tensors)`` the results that
    go back (none for a block of its own), ``sums(block)`` tensors shaped like those results, ``take(block, results)`` adds
    results that another rank computed.
    """

    given: Callable[[Block], Tensors]
    compute: Callable[[Block, Tensors], Tensors]
    sums: Callable[[Block], Tensors]
    take: Callable[[Block, Tensors], None]


def run(rounds: Sequence[Round], group: dist.ProcessGroup, work: Work, returns: Callable[[Block], bool]) -> None:
    """Compute this rank's blocks and receive the results of other ranks. ``returns`` marks blocks whose results are sent."""
    rank = group.rank()
    computed: dict[Block, Tensors] = {}

    def inputs(turn: Round) -> Iterator[BlockMessage]:
        for block in turn:
            source = block.key if block.moves_keys else block.query
            if source != block.where:
                yield BlockMessage(block, source, block.where, _sent_or_room(rank, source, block, work.given))

    def results(turn: Round) -> Iterator[BlockMessage]:
        for block in turn:
            target = block.key if block.moves_keys else block.query
            if target != block.where and returns(block):
                sent = computed.pop(block) if rank == block.where else _room(work.sums(block))
                yield BlockMessage(block, block.where, target, sent)

    turns = [(), *rounds, (), ()]
    coming, going = _post(group, [*inputs(turns[1])]), _post(group, [])
    for before, turn, after in zip(turns, turns[1:], turns[2:], strict=False):
        arrived = {message.block: message.tensors for message in coming.wait()}
        for message in going.wait():
            work.take(message.block, message.tensors)
        coming, going = _post(group, [*inputs(after)]), _post(group, [*results(before)])
        for block in turn:
            if block.where == rank:
                computed[block] = work.compute(block, arrived.get(block, []))
    for message in going.wait():
        work.take(message.block, message.tensors)


@dataclass(frozen=True, slots=True)
class _Posted:
    messages: list[BlockMessage]
    works: list[dist.Work]

    def wait(self) -> list[BlockMessage]:
        """Give the messages that arrived for this rank."""
        for work in self.works:
            work.wait()
        return self.messages


def _post(group: dist.ProcessGroup, messages: Iterable[BlockMessage]) -> _Posted:
    """Begin all messages of which this rank is an end, in one order on all ranks."""
    rank, operations, arriving = group.rank(), [], []
    for message in messages:
        if rank == message.source:
            operations += [dist.P2POp(dist.isend, x, group=group, group_peer=message.target) for x in message.tensors]
        elif rank == message.target:
            arriving.append(message)
            operations += [dist.P2POp(dist.irecv, x, group=group, group_peer=message.source) for x in message.tensors]
    return _Posted(arriving, dist.batch_isend_irecv(operations) if operations else [])


def _sent_or_room(rank: int, source: int, block: Block, given: Callable[[Block], Tensors]) -> Tensors:
    own = given(block)
    return own if rank == source else _room(own)


def _room(like: Tensors) -> Tensors:
    return [torch.empty_like(x) for x in like]
