"""Programs of the ranks of a pipeline, from the lists of operations that they run."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from mindspeed.pipeline.messages import Message, needed, routes
from mindspeed.pipeline.operations import Costs, Schedule
from mindspeed.workbench.exposure.programs import Computation, Event, PeerTransfer, Post, Programs, Wait


def pipeline_programs(schedule: Schedule, costs: Costs, size: float = 0.0) -> Programs:
    """Return programs in which an operation does its ``costs`` of work, and messages between ranks have ``size`` bytes.

    As in `mindspeed.pipeline.transport`, each channel has a communicator, and a receive is posted when the one before it has
    been waited for.
    """
    return {rank: list(_program(schedule, costs, size, rank)) for rank in range(schedule.shape.pp)}


def _program(schedule: Schedule, costs: Costs, size: float, rank: int) -> Iterator[Event]:
    shape, order = schedule.shape, routes(schedule)
    numbers, posted = count(), dict[Message, int]()
    sources, targets = order.sources(rank), order.targets(rank)
    coming = {source: iter(order.order[source, rank]) for source in dict.fromkeys(sources.values())}

    def receive(source: int) -> Iterator[Event]:
        if (message := next(coming[source], None)) is not None:
            posted[message] = next(numbers)
            yield Post(
                posted[message], f"{message}", f"{source} to {rank}", (source, rank), (PeerTransfer("recv", size, source),)
            )

    for source in coming:
        yield from receive(source)
    for op in schedule.ops[rank]:
        stage = shape.stage_of(rank, op.chunk)
        wanted = needed(op, stage, shape.stages)
        if wanted is not None and wanted in sources:
            source = sources[wanted]
            while wanted not in posted:
                yield from receive(source)
            yield Wait(posted[wanted])
            yield from receive(source)
        yield Computation(str(op), costs.of(op.kind, stage))
        made = Message("F" if op.kind == "F" else "B", stage, op.micro_batch)
        if op.kind in "FBD" and made in targets:
            target = targets[made]
            yield Post(next(numbers), f"{made}", f"{rank} to {target}", (rank, target), (PeerTransfer("send", size, target),))
