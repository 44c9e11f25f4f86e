"""State of the running step for later use, as the wraps of Megatron's functions find it.

A module variable and not a context variable: backward passes run in threads of autograd, which see no context.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from mindspeed.pipeline.checkpoints import Checkpoints
    from mindspeed.pipeline.own_schedule import OwnSchedule
    from mindspeed.pipeline.weight_gradients import WeightGradients


class RunningStep(NamedTuple):
    """The queue of weight gradients and the checkpoints of a step; None where its list has no such operation.

    ``own`` are the units of Megatron's own schedule, where that one runs.
    """

    queue: WeightGradients | None = None
    checkpoints: Checkpoints | None = None
    own: OwnSchedule | None = None


_IDLE: Final = RunningStep()
_running: RunningStep = _IDLE


def running_step() -> RunningStep:
    """Return what the running step keeps, nothing outside of a step."""
    return _running


@contextmanager
def running(step: RunningStep) -> Iterator[None]:
    """Let the wraps find a step for the length of a with-block."""
    global _running
    before, _running = _running, step
    try:
        yield
    finally:
        _running = before
