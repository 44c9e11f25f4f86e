"""Base of features that bring a pipeline schedule. Light."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from mindspeed.pipeline.conditions import ScheduleArgs
from mindspeed.pipeline.messages import CHANNELS, channels, independent
from mindspeed.pipeline.operations import Costs, PipelineShape, Placement, Schedule
from mindspeed.platforms.backend_rules import PAIR
from mindspeed.plugins import Feature, hookimpl
from mindspeed.plugins.saved_tensors import SavedTensors

ArgsT = TypeVar("ArgsT", bound=ScheduleArgs)


class ScheduleFeature(Feature[ArgsT], ABC):
    """Run the lists of operations of `planned_schedule` in place of Megatron's schedules."""

    engine: Any = None
    """The schedules of this rank, from the time when Megatron has its groups."""

    @abstractmethod
    def planned_schedule(self, shape: PipelineShape, costs: Costs) -> Schedule:
        """Return the list of operations of each rank. Raises ValueError where none keeps the settings."""

    def engine_options(self) -> dict[str, Any]:
        """Return further options of `mindspeed.pipeline.megatron.Engine`."""
        return {}

    def placement(self) -> Placement:
        """Return the placement of the stages on ranks."""
        return "loop"

    def with_copies(self, tensors: SavedTensors) -> SavedTensors:
        """Return what the optimizer keeps between two steps, with the copies that this schedule makes of it."""
        return tensors

    def costs(self) -> Costs:
        """Return the costs that a schedule is made for."""
        return Costs()

    @hookimpl
    def job_values(self) -> Mapping[str, Any]:
        return {"v_placement": True} if self.placement() == "v" else {}

    @hookimpl
    def communicators(self) -> Sequence[str]:
        ranks = range(self.world.pp)
        sets = independent(channels(len(ranks), self.world.vpp, self.placement())) if len(ranks) > 1 else []
        most = max(sum(any(rank in channel for channel in chosen) for chosen in sets) for rank in ranks)
        return [f"{CHANNELS}_{number}{PAIR}" for number in range(most)]

    @hookimpl
    def groups_created(self, sizes: dict[str, int], get_group: Callable[[str], Any]) -> None:
        import torch
        from megatron.core.parallel_state import get_virtual_pipeline_model_parallel_world_size

        from mindspeed.pipeline.megatron import Engine
        from mindspeed.pipeline.transport import open_links

        empty = partial(torch.empty, device=torch.cuda.current_device())
        self.engine = Engine(
            self.spec.name,
            self.planned_schedule,
            open_links(get_group("pp"), get_virtual_pipeline_model_parallel_world_size() or 1, self.placement(), empty),
            placement=self.placement(),
            costs=self.costs(),
            trace=self.args.trace,
            **self.engine_options(),
        )

    @hookimpl
    def groups_destroyed(self) -> None:
        if self.engine is not None:
            self.engine.destroy()
            self.engine = None

    @hookimpl
    def schedule(self, config: Any) -> Callable[..., Any] | None:
        engine: Callable[..., Any] | None = self.engine
        return engine
