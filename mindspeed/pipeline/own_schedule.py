"""Recomputation under Megatron's own schedules: R runs when the schedule begins to wait for the gradient of a unit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mindspeed.pipeline.checkpoints import Checkpoints
from mindspeed.pipeline.operations import Op, Schedule
from mindspeed.pipeline.recording import Timed
from mindspeed.pipeline.running_step import running_step
from mindspeed.plugins.patches import Function, wrapper


class OwnSchedule:
    """The units of a rank in one step of Megatron's own schedule, counted as its passes and its receives come.

    ``schedule`` is Megatron's order with the R of each unit that is recomputed. Results do not depend on the count: what was
    not restored before its backward pass is restored by it. ``clock`` is there where the operations are timed.
    """

    def __init__(self, schedule: Schedule, rank: int, clock: Callable[[], float] | None = None) -> None:
        ops, shape = schedule.ops[rank], schedule.shape
        self.checkpoints = Checkpoints(frozenset(op[1:] for op in ops if op.kind == "R"))
        self.timed: list[Timed] = []
        self._clock = clock
        self._end = clock() if clock is not None else 0.0
        self._dropped = {op[1:]: op for op in ops if op.kind == "R"}
        self._forwards = iter([op for op in ops if op.kind == "F"])
        self._backwards = iter([op for op in ops if op.kind == "D"])
        last = shape.stages - 1
        self._gradients = iter([op[1:] for op in ops if op.kind == "D" and shape.stage_of(rank, op.chunk) < last])

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Run the next forward pass: its checkpoints belong to the next unit."""
        op = next(self._forwards)
        with self.checkpoints.entered(op[1:]), self._timed(op):
            yield

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Run the next backward pass."""
        op = next(self._backwards)
        with self._timed(op):
            yield
        self.checkpoints.forget(op[1:])

    def next_gradient(self) -> Callable[[], None]:
        """Return what runs before the wait for the next gradient: R of its unit, once."""
        op = self._dropped.pop(next(self._gradients), None)
        left = [] if op is None else [op]

        def restore() -> None:
            while left:
                op = left.pop()
                with self._timed(op):
                    self.checkpoints.restore(op[1:])

        return restore

    @contextmanager
    def _timed(self, op: Op) -> Iterator[None]:
        if self._clock is None:
            yield
            return
        begin = self._clock()
        yield
        end = self._clock()
        self.timed.append(Timed(op, begin, end, begin - self._end))
        self._end = end


class RestoringHandle:
    """Handle of a message that runs a function before it waits."""

    def __init__(self, handle: Any, before: Callable[[], None]) -> None:
        self._handle, self._before = handle, before

    def wait(self, *arguments: Any) -> Any:
        self._before()
        return self._handle.wait(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)


@wrapper
def with_restoring_handles(original: Function, *args: Any, tensor_recv_next: Any = None, **more: Any) -> Any:
    """Wrap ``_p2p_ops`` and ``_batched_p2p_ops``, whose handles every schedule of Megatron waits for.

    The messages of one call are on their way when the first of its handles is waited for. Of handles by name, which schedules
    wait for one by one, that of the gradient restores.
    """
    handles = original(*args, tensor_recv_next=tensor_recv_next, **more)
    own = running_step().own
    if own is None or tensor_recv_next is None or not handles:
        return handles
    restore = own.next_gradient()
    if isinstance(handles, dict):
        return {name: RestoringHandle(work, restore) if name == "recv_next" else work for name, work in handles.items()}
    return [RestoringHandle(work, restore) for work in handles]
