"""Messages between the ranks of a schedule, in the order of each sender. Light, no torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

from mindspeed.pipeline.operations import Op, PipelineShape, Placement, Schedule

Channel = tuple[int, int]
"""Sending and receiving rank."""
CHANNELS: Final = "PIPELINE_CHANNELS"
"""Description of the process groups of sets of channels, before the number of the set."""

VALIDATION: Final = "POST_VALIDATION"
"""Description of the process group that sums gradient norms for a later validation."""


class Message(NamedTuple):
    """Output (F) or input gradient (B) of a stage for a micro-batch."""

    kind: str
    stage: int
    micro_batch: int


def needed(op: Op, stage: int, stages: int) -> Message | None:
    """Return the message that an operation of a stage waits for."""
    if op.kind == "F":
        return Message("F", stage - 1, op.micro_batch) if stage else None
    if op.kind in "BD":
        return Message("B", stage + 1, op.micro_batch) if stage + 1 < stages else None
    return None


def produced(op: Op, stage: int, stages: int) -> tuple[Message, int] | None:
    """Return the message that an operation of a stage makes, and the stage that needs it."""
    if op.kind == "F":
        return (Message("F", stage, op.micro_batch), stage + 1) if stage + 1 < stages else None
    if op.kind in "BD":
        return (Message("B", stage, op.micro_batch), stage - 1) if stage else None
    return None


def channels(pp: int, vpp: int, placement: Placement) -> list[Channel]:
    """Return the channels of all schedules with a placement, with the one that moves losses to the last rank."""
    shape = PipelineShape(pp, vpp, 1, placement)
    ranks = [shape.rank_of(stage) for stage in range(shape.stages)]
    used = {channel for a, b in pairwise(ranks) for channel in ((a, b), (b, a))} | {(ranks[-1], pp - 1)}
    return sorted((sender, target) for sender, target in used if sender != target)


def independent(channels: Sequence[Channel]) -> list[list[Channel]]:
    """Divide channels into few sets; a rank has at most one channel of a set.

    One communicator per set is enough where its operations run in order (NCCL, HCCL). A rank's queue then has the messages of
    one channel only, so a receive that is started ahead never holds a send.
    """
    sets: list[list[Channel]] = []
    for channel in channels:
        free = (chosen for chosen in sets if not {rank for other in chosen for rank in other} & {*channel})
        if (chosen := next(free, None)) is None:
            sets.append([channel])
        else:
            chosen.append(channel)
    return sets


@dataclass(frozen=True, slots=True)
class Routes:
    """Order of the messages on each channel, and what each message implies for those in the other direction.

    ``consumed[channel][i]`` is the number of messages that the sender of the i-th message had received from its receiver.
    """

    order: Mapping[Channel, tuple[Message, ...]]
    consumed: Mapping[Channel, tuple[int, ...]]

    def sources(self, rank: int) -> dict[Message, int]:
        """Return the sender of each message to a rank."""
        return {message: sender for (sender, target), order in self.order.items() if target == rank for message in order}

    def targets(self, rank: int) -> dict[Message, int]:
        """Return the receiver of each message of a rank."""
        return {message: target for (sender, target), order in self.order.items() if sender == rank for message in order}


def routes(schedule: Schedule) -> Routes:
    """Return the messages of a schedule, without those that a rank sends to itself."""
    shape: PipelineShape = schedule.shape
    order: defaultdict[Channel, list[Message]] = defaultdict(list)
    steps = [
        (rank, op, shape.stage_of(rank, op.chunk)) for rank, ops in enumerate(schedule.ops) for op in ops if op.kind in "FBD"
    ]
    for rank, op, stage in steps:
        if (made := produced(op, stage, shape.stages)) is not None and (target := shape.rank_of(made[1])) != rank:
            order[rank, target].append(made[0])
    place = {channel: {message: index for index, message in enumerate(messages)} for channel, messages in order.items()}
    received: defaultdict[Channel, int] = defaultdict(int)
    consumed: defaultdict[Channel, list[int]] = defaultdict(list)
    for rank, op, stage in steps:
        if (message := needed(op, stage, shape.stages)) is not None and (source := shape.rank_of(message.stage)) != rank:
            received[source, rank] = max(received[source, rank], place[source, rank][message] + 1)
        if (made := produced(op, stage, shape.stages)) is not None and (target := shape.rank_of(made[1])) != rank:
            consumed[rank, target].append(received[target, rank])
    return Routes({k: tuple(v) for k, v in order.items()}, {k: tuple(v) for k, v in consumed.items()})


def warm_up(schedule: Schedule) -> Schedule:
    """Return the forward passes with which the lists of all ranks begin, without those that need an operation behind them."""
    shape = schedule.shape
    counts = [next((at for at, op in enumerate(ops) if op.kind != "F"), len(ops)) for ops in schedule.ops]
    if schedule.pairs:
        counts = [min([count, *places]) for count, places in zip(counts, schedule.pairs, strict=True)]
    before: list[int] = []
    while before != counts:
        before = list(counts)
        made = {(shape.stage_of(r, op.chunk), op.micro_batch) for r, ops in enumerate(schedule.ops) for op in ops[: counts[r]]}
        for rank, ops in enumerate(schedule.ops):
            messages = [needed(op, shape.stage_of(rank, op.chunk), shape.stages) for op in ops[: counts[rank]]]
            lacks = [message is not None and message[1:] not in made for message in messages]
            counts[rank] = (*lacks, True).index(True)
    return Schedule(schedule.name, shape, tuple(ops[:count] for ops, count in zip(schedule.ops, counts, strict=True)))
