"""Execution of one rank's list of operations on its stages."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple, Protocol

from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode

from mindspeed.pipeline.failing_pass import add_place
from mindspeed.pipeline.messages import Message, needed, produced
from mindspeed.pipeline.operations import Op, Schedule
from mindspeed.pipeline.transport import Channels
from mindspeed.platforms import runtime
from mindspeed.process.place import PLACE
from mindspeed.process.turns import State, in_turns


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


class Review(NamedTuple):
    """Decision behind the first operations of a rank, ``after`` of them, whether they hold or are repeated."""

    after: int
    holds: Callable[[], bool]


def execute(
    schedule: Schedule,
    rank: int,
    stages: Stages,
    channels: Channels,
    record: Record | None = None,
    clock: Callable[[], float] = time.perf_counter,
    states: Sequence[State] = (),
    review: Review | None = None,
) -> None:
    """Run the operations of a rank in their order. Returns when all of its messages were received.

    Operations that are paired take turns wherever one of them would wait for an all-to-all; ``states`` are those of random
    number generators and others that each needs for itself. With a ``review`` the first operations may run twice.
    """
    run = _Execution(schedule, rank, stages, channels)
    ops, index = schedule.ops[rank], 0
    while index < len(ops):
        if review is not None and index == review.after:
            if not review.holds():
                run, index = _Execution(schedule, rank, stages, channels), 0
            review = None
            continue
        together = schedule.together(rank, index)
        index += len(together)
        arrived = clock()
        given = [run.receive(op) for op in together]
        begin = clock()
        if len(together) == 1:
            made = [run.compute(together[0], given[0])]
        else:
            forward, backward = (partial(run.compute, op, tensor) for op, tensor in zip(together, given, strict=True))
            made = list(in_turns(forward, in_thread_like_this(backward), (PLACE, *states)))
        for op, output in zip(together, made, strict=True):
            run.deliver(op, output)
        if record is not None:
            for op in together:
                record(op, begin, clock(), begin - arrived)
    channels.finish()


class _Execution:
    """The tensors of one pass over the list of a rank."""

    def __init__(self, schedule: Schedule, rank: int, stages: Stages, channels: Channels) -> None:
        self._shape, self._rank, self._stages, self._channels = schedule.shape, rank, stages, channels
        self._training = any(op.kind != "F" for op in schedule.ops[rank])
        self._alive: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}
        self._handed_over: dict[Message, Tensor] = {}

    def receive(self, op: Op) -> Tensor | None:
        """Return what another stage has made for an operation."""
        message = needed(op, self._shape.stage_of(self._rank, op.chunk), self._shape.stages)
        if message is None:
            return None
        if self._shape.rank_of(message.stage) == self._rank:
            return self._handed_over.pop(message)
        return self._channels.receive(message)

    def compute(self, op: Op, given: Tensor | None) -> Tensor | None:
        """Run an operation on what it was given. An error gets a note that names the operation and the place."""
        PLACE.done = ""
        try:
            return self._compute(op, given)
        except Exception as error:
            add_place(error, op, self._shape.stage_of(self._rank, op.chunk))
            raise

    def _compute(self, op: Op, given: Tensor | None) -> Tensor | None:
        if op.kind == "F":
            if given is not None and self._training:
                given.requires_grad_()
            output = self._stages.forward(op, given)
            if self._training:
                self._alive[op[1:]] = given, output
            return output
        if op.kind in "RW":
            (self._stages.recompute if op.kind == "R" else self._stages.weight)(op)
            return None
        source, output = self._alive.pop(op[1:])
        return self._stages.backward(op, source, output, given)

    def deliver(self, op: Op, made: Tensor | None) -> None:
        """Send what an operation has made to the stage that needs it."""
        route = produced(op, self._shape.stage_of(self._rank, op.chunk), self._shape.stages)
        if made is None or route is None:
            return
        if self._shape.rank_of(route[1]) == self._rank:
            self._handed_over[route[0]] = made.detach()
        else:
            self._channels.send(route[0], made, self._freeing(op, made))

    def _freeing(self, op: Op, made: Tensor) -> Callable[[], None]:
        return (lambda: self._stages.sent(op, made)) if op.kind == "F" else lambda: None


def in_thread_like_this(computation: Callable[[], Tensor | None]) -> Callable[[], Tensor | None]:
    """Return a computation that finds in another thread what torch keeps for each: device, stream and dispatch modes."""
    device = runtime.device_module()
    index, stream = device.current_device(), device.current_stream()
    modes = list(_get_current_dispatch_mode_stack())

    def run() -> Tensor | None:
        with ExitStack() as stack:
            device.set_device(index)
            stack.enter_context(device.stream(stream))
            for mode in modes:
                _push_mode(mode)
                stack.callback(_pop_mode)
            return computation()

    return run
