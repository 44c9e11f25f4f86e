"""Base of features that bring a pipeline schedule. Light."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

from pydantic import Field

from mindspeed.pipeline.operations import Costs, PipelineShape, Placement, Schedule
from mindspeed.pipeline.refusals import model_refusals, refusals, v_refusals
from mindspeed.plugins.constraints import Check
from mindspeed.plugins.feature import Feature, FeatureArgs
from mindspeed.plugins.hookspecs import hookimpl
from mindspeed.plugins.patches import ArgOverride, When, Wrap

WAITING_WEIGHTS: Final = Wrap(
    "megatron.core.tensor_parallel.layers:linear_with_grad_accumulation_and_async_allreduce",
    "mindspeed.pipeline.linear:with_queue",
    reason="the backward pass of a linear layer computes the gradient of its input alone",
)
"""The patch of a schedule with operations W."""

V_PLACEMENT: Final = (
    Wrap(
        "megatron.core.models.gpt.gpt_model:GPTModel.__init__",
        "mindspeed.pipeline.v_placement:with_untied_weights",
        reason="a model whose embedding is the output layer too is refused before its ranks wait for one another",
        phase="build",
        optional=True,
    ),
    Wrap(
        "megatron.core.transformer.transformer_layer:get_transformer_layer_offset",
        "mindspeed.pipeline.v_placement:with_v_offset",
        reason="the second chunk of rank r holds the stage that is r before the last one",
        phase="build",
    ),
    Wrap(
        "megatron.core.parallel_state:is_pipeline_last_stage",
        "mindspeed.pipeline.v_placement:with_v_last_stage",
        reason="the last stage is chunk 1 of rank 0",
        phase="build",
        optional=True,
    ),
    Wrap(
        "megatron.core.pipeline_parallel.utils:is_pp_last_stage",
        "mindspeed.pipeline.v_placement:with_v_last_rank",
        reason="the last stage is on rank 0, whose chunk Megatron asks for beside",
        phase="build",
        optional=True,
    ),
    *(
        Wrap(
            f"{module}:get_batch_on_this_tp_rank",
            "mindspeed.pipeline.v_placement:with_whole_batch",
            reason="the ranks of the first stage hold the last one too, and need labels",
            when=When(megatron=versions),
            optional=True,
        )
        for module, versions in (("megatron.training.utils", "<0.18"), ("megatron.core.utils", ">=0.18"))
    ),
)
"""The patches of stages that are placed as a V."""

LISTED_RECOMPUTE: Final = Wrap(
    "megatron.core.tensor_parallel.random:checkpoint",
    "mindspeed.pipeline.checkpoints:with_early_restore",
    reason="the forward pass is repeated where the list of operations says so, before the gradient arrives",
)
"""The patch of a schedule with operations R."""


def needs_stages(name: str) -> Check:
    """Return the check that there is more than one pipeline stage."""
    return Check(
        lambda args, world: world.pp > 1,
        "one pipeline stage waits for no other, and there is {world.pp}",
        fix=f"--pp 2 or more, or remove {name}",
    )


def full_recompute(reason: str, num_layers: int = 1) -> list[ArgOverride]:
    """Return the arguments with which Megatron passes every layer through its checkpoint."""
    values: dict[str, str | int] = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": num_layers,
    }
    return [ArgOverride(name, value, reason) for name, value in values.items()]


class ScheduleArgs(FeatureArgs):
    """Settings of every feature that brings a pipeline schedule."""

    trace: str | None = Field(
        None, description="folder in which every rank records its operations of a step, for mindspeed schedule show --trace"
    )


ArgsT = TypeVar("ArgsT", bound=ScheduleArgs)


class ScheduleFeature(Feature[ArgsT]):
    """Run the lists of operations of `planned_schedule` in place of Megatron's schedules."""

    engine: Any = None
    """The schedules of this rank, from the time when Megatron has its groups."""

    def planned_schedule(self, shape: PipelineShape, costs: Costs) -> Schedule:
        """Return the list of operations of each rank. Raises ValueError where none keeps the settings."""
        raise NotImplementedError

    def engine_options(self) -> dict[str, Any]:
        """Return further options of `mindspeed.pipeline.megatron.Engine`."""
        return {}

    def placement(self) -> Placement:
        """Return the placement of the stages on ranks."""
        return "loop"

    def costs(self) -> Costs:
        """Return the costs that a schedule is made for."""
        return Costs()

    @hookimpl
    def config_ready(self, config: Any) -> None:
        uneven = v_refusals(config) if self.placement() == "v" else ()
        if wrong := [*refusals(config), *uneven]:
            self.decline("; ".join(wrong))

    @hookimpl
    def model_built(self, chunks: Any) -> None:
        if wrong := sorted(model_refusals(chunks)):
            self.decline("; ".join(wrong))

    @hookimpl
    def groups_created(self, sizes: dict[str, int], get_group: Callable[[str], Any]) -> None:
        if sizes["pp"] == 1:
            return
        from mindspeed.pipeline.megatron import Engine
        from mindspeed.pipeline.transport import open_links

        self.engine = Engine(
            self.spec.name,
            self.planned_schedule,
            open_links(get_group("pp")),
            placement=self.placement(),
            costs=self.costs(),
            trace=self.args.trace,
            **self.engine_options(),
        )

    @hookimpl
    def groups_destroyed(self) -> None:
        if self.engine is not None:
            self.engine.links.destroy()
            self.engine = None

    @hookimpl
    def schedule(self, config: Any) -> Callable[..., Any] | None:
        engine: Callable[..., Any] | None = self.engine
        return engine
