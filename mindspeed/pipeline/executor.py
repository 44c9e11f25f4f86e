"""Execution of one rank's list of operations on its stages."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from mindspeed.pipeline.messages import Message, needed, produced
from mindspeed.pipeline.operations import Op, Schedule
from mindspeed.pipeline.transport import Channels


class Stages(Protocol):
    """The model chunks of a rank."""

    def forward(self, op: Op, given: Tensor | None) -> Tensor:
        """Run F on the output of the stage before, None for the first stage; return the output."""

    def backward(self, op: Op, given: Tensor | None, output: Tensor, gradient: Tensor | None) -> Tensor | None:
        """Run B or D; return the gradient of the input, None for the first stage."""

    def weight(self, op: Op) -> None:
        """Run W."""

    def recompute(self, op: Op) -> None:
        """Run R."""

    def sent(self, op: Op, output: Tensor) -> None:
        """Free the contents of an output that another rank has received."""


Record = Callable[[Op, float, float, float], None]
"""Receives an operation with its begin, its end and the time that it waited for its message before it began."""


def execute(
    schedule: Schedule,
    rank: int,
    stages: Stages,
    channels: Channels,
    record: Record | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Run the operations of a rank in their order. Returns when all of its messages were received."""
    shape = schedule.shape
    alive: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}
    handed_over: dict[Message, Tensor] = {}
    training = any(op.kind != "F" for op in schedule.ops[rank])
    for op in schedule.ops[rank]:
        arrived = clock()
        stage = shape.stage_of(rank, op.chunk)
        message = needed(op, stage, shape.stages)
        given = None
        if message is not None:
            given = handed_over.pop(message) if shape.rank_of(message.stage) == rank else channels.receive(message)
        begin = clock()
        made: Tensor | None = None
        if op.kind == "F":
            if given is not None and training:
                given.requires_grad_()
            made = output = stages.forward(op, given)
            if training:
                alive[op[1:]] = given, output
        elif op.kind == "R":
            stages.recompute(op)
        elif op.kind == "W":
            stages.weight(op)
        else:
            source, output = alive.pop(op[1:])
            made = stages.backward(op, source, output, given)
        if made is not None and (route := produced(op, stage, shape.stages)) is not None:
            if shape.rank_of(route[1]) == rank:
                handed_over[route[0]] = made.detach()
            else:
                channels.send(route[0], made, _freeing(stages, op, made))
        if record is not None:
            record(op, begin, clock(), begin - arrived)
    channels.finish()


def _freeing(stages: Stages, op: Op, made: Tensor) -> Callable[[], None]:
    return (lambda: stages.sent(op, made)) if op.kind == "F" else lambda: None
