"""Base of features that recompute activations while a pipeline stage waits. Light."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar

from mindspeed import plugins as ms
from mindspeed.pipeline.conditions import KEEPS_FORWARDS, LISTED_RECOMPUTE, NO_SHARDED_MODEL, ScheduleArgs
from mindspeed.pipeline.operations import Costs, PipelineShape, Schedule
from mindspeed.pipeline.running_step import RunningStep, running, running_step
from mindspeed.plugins.constraints import Constraint

if TYPE_CHECKING:
    from mindspeed.pipeline.recording import Timed

_HANDLES: Final = tuple(
    ms.Wrap(
        f"megatron.core.pipeline_parallel.p2p_communication:{name}",
        "mindspeed.pipeline.own_schedule:with_restoring_handles",
        reason="starts recomputing a micro-batch when Megatron's schedule begins to wait for the gradient of that micro-batch",
        optional=True,
    )
    for name in ("_p2p_ops", "_batched_p2p_ops")
)

CONSTRAINTS: Final[tuple[Constraint, ...]] = (
    *KEEPS_FORWARDS,
    NO_SHARDED_MODEL,
)
"""Conditions of every feature of this kind."""

ArgsT = TypeVar("ArgsT", bound=ScheduleArgs)


class RecomputeFeature(ms.Feature[ArgsT], ABC):
    """Run R before a gradient is waited for: under Megatron's own schedules, or as `listed` in another feature's list."""

    recomputed = 0
    """Units for which R ran ahead in the latest step of Megatron's own schedule."""
    recorded: Sequence[Timed] = ()
    """The times of that step, where they are recorded."""
    _schedules: dict[PipelineShape, Schedule] | None = None

    @abstractmethod
    def listed(self, base: Schedule) -> Schedule:
        """Return a schedule with the R that it needs. Raises ValueError where it cannot keep the settings."""

    def planned_schedule(self, shape: PipelineShape, costs: Costs) -> Schedule:
        """Return Megatron's own order with R."""
        from mindspeed.pipeline.synthesis import megatron

        return self.listed(megatron(shape))

    @ms.hookimpl
    def patches(self) -> list[ms.Patch]:
        return [LISTED_RECOMPUTE, *_HANDLES]

    @ms.hookimpl
    def around_schedule(
        self, chunks: Sequence[Any], forward_only: bool, micro_batches: int
    ) -> AbstractContextManager[None] | None:
        return None if forward_only else self._own_schedule(chunks, micro_batches)

    @contextmanager
    def _own_schedule(self, chunks: Sequence[Any], micro_batches: int) -> Iterator[None]:
        """Let Megatron's schedule find its units for the length of a step; a list of operations puts its own in their place."""
        from megatron.core import parallel_state
        from megatron.core.utils import get_model_config

        from mindspeed.pipeline.own_schedule import OwnSchedule
        from mindspeed.pipeline.recording import device_time, write_trace

        group = getattr(get_model_config(chunks[0]), "microbatch_group_size_per_vp_stage", None) if len(chunks) > 1 else None
        stages = parallel_state.get_pipeline_model_parallel_world_size()
        shape = PipelineShape(stages, len(chunks), micro_batches, group=group)
        self._schedules = self._schedules or {}
        if shape not in self._schedules:
            self._schedules[shape] = self.planned_schedule(shape, Costs())
        rank = parallel_state.get_pipeline_model_parallel_rank()
        own = OwnSchedule(self._schedules[shape], rank, device_time if self.args.trace is not None else None)
        with running(RunningStep(checkpoints=own.checkpoints, own=own)):
            yield
        self.recomputed, self.recorded = own.checkpoints.recomputed, own.timed
        if self.args.trace is not None and own.timed:
            write_trace(self.args.trace, own.timed)

    @ms.hookimpl
    def around_forward_step(self, unit: Any) -> AbstractContextManager[None] | None:
        own = running_step().own
        return None if own is None else own.forward()

    @ms.hookimpl
    def around_backward_step(self, unit: Any) -> AbstractContextManager[None] | None:
        own = running_step().own
        return None if own is None else own.backward()
