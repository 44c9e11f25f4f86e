"""Conditions, patches, arguments and settings that features of pipelines share. Light."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from mindspeed import plugins as ms
from mindspeed.pipeline.operations import PipelineShape, Placement
from mindspeed.plugins.shared_conditions import NO_OTHER_PASSES, NO_TRANSFORMER_ENGINE_LAYERS

WAITING_WEIGHTS: Final = ms.Wrap(
    "megatron.core.tensor_parallel.layers:linear_with_grad_accumulation_and_async_allreduce",
    "mindspeed.pipeline.linear:with_queue",
    reason="computes only the input gradient in the backward pass of a linear layer, and queues the weight gradient for a "
    "later time in the schedule",
)
"""The patch of a schedule with operations W."""

LISTED_RECOMPUTE: Final = ms.Wrap(
    "megatron.core.tensor_parallel.random:checkpoint",
    "mindspeed.pipeline.checkpoints:with_early_restore",
    reason="repeats the forward pass of recomputed layers at a separate step of the pipeline schedule, before their gradient "
    "arrives",
)
"""The patch of a schedule with operations R."""

_WITHOUT_REDUCTION: Final = "mindspeed.pipeline.post_validation:without_reduction"
STEP_REPEATED: Final = (
    ms.Wrap(
        "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.zero_grad_buffer",
        "mindspeed.pipeline.post_validation:clear_after_validation",
        reason="keeps gradients until the optimizer step is validated, which may have to be repeated",
    ),
    ms.Wrap(
        "megatron.core.optimizer_param_scheduler:OptimizerParamScheduler.step",
        "mindspeed.pipeline.post_validation:with_steps_to_take_back",
        reason="does not count a step that is skipped at its validation",
        optional=True,
    ),
    *(
        ms.Wrap(
            f"megatron.training.utils:{name}",
            _WITHOUT_REDUCTION,
            reason=f"does not wait for other pipeline stages: {what} of a step is the same on every rank",
            optional=True,
        )
        for name, what in (
            ("logical_and_across_model_parallel_group", "the success"),
            ("reduce_max_stat_across_model_parallel_group", "the gradient norm"),
        )
    ),
)
"""The patches of a schedule whose optimizer steps are validated later."""


def full_recompute(reason: str, num_layers: int = 1) -> list[ms.ArgOverride]:
    """Return the arguments with which Megatron passes every layer through its checkpoint."""
    values: dict[str, str | int] = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": num_layers,
    }
    return [ms.ArgOverride(name, value, reason) for name, value in values.items()]


class ScheduleArgs(ms.FeatureArgs):
    """Settings of every feature that provides a pipeline schedule."""

    trace: str | None = ms.Field(
        None,
        description="If set: folder to which every rank writes the times of its forward and backward passes. Draw them with "
        "mindspeed schedule show --trace",
    )


_REMOVE: Final = ms.Fix.remove_feature()


has_stages = ms.Condition.at_least("pp", 2, "at least two pipeline stages are needed, but pp is {world.pp}")


def planned_shape(world: ms.World, placement: Placement = "loop") -> PipelineShape:
    """Return the sizes of a job's pipeline, as Megatron's configuration gives them to the schedule of a step."""
    return PipelineShape(world.pp, world.vpp, max(1, world.num_micro_batches), placement, world.micro_batch_group or None)


def shares(args: Any, world: ms.World) -> Mapping[str, int | str]:
    """Return the layers that stages share equally, also as a sum of the layers of the job, and the number of these stages."""
    layers, stages = world.equal_share
    parts = [f" + 1 ({name})" for name, field in _COUNTED.items() if world.is_set(field)]
    apart = {"first stage": world.first_stage_layers, "last stage": world.last_stage_layers}
    parts += [f" - {number} ({name})" for name, number in apart.items() if number]
    shared = f"{world.num_layers}{''.join(parts)} = {layers}" if parts else layers
    return {"layers": layers, "stages": stages, "shared": shared}


_COUNTED: Final = {"embedding": "embedding_is_layer", "output layer": "loss_is_layer"}
"""What may count as a layer, and the field of the job by which it does."""

NO_PARTIAL_CHECKPOINTS: Final = ms.Condition.unset(
    "partial_checkpoints",
    "Megatron recomputes only some micro-batches (num_microbatches_with_partial_activation_checkpoints), which "
    "{feature} does not support",
)

KEEPS_FORWARDS: Final = (has_stages, *NO_OTHER_PASSES, NO_PARTIAL_CHECKPOINTS)
"""Conditions of every feature that recomputes forward passes in a pipeline schedule, be it Megatron's own."""

REPLACES_SCHEDULE: Final = (
    *NO_OTHER_PASSES,
    NO_PARTIAL_CHECKPOINTS,
    ms.Condition.unset(
        "ring_exchange", "stages send and receive at the same time (ring exchange), but {feature} orders messages one by one"
    ),
    ms.Condition.unset(
        "delayed_weight_gradients",
        "Megatron's schedule delays weight gradients (delay_wgrad_compute), but {feature} replaces this schedule",
    ),
    ms.Condition.unset(
        "deferred_embedding_gradients",
        "Megatron's schedule defers the weight gradient of the output layer (defer_embedding_wgrad_compute), but {feature} "
        "replaces this schedule",
    ),
    ms.Condition.unset(
        "hybrid_context_parallel",
        "Megatron's schedule balances packed samples over context-parallel ranks (hybrid_context_parallel), but {feature} "
        "replaces this schedule",
    ),
)
"""Conditions of every feature that replaces Megatron's schedule: no argument that only Megatron's schedule follows."""

KEEPS_PASSES: Final = (
    has_stages,
    *REPLACES_SCHEDULE,
    NO_TRANSFORMER_ENGINE_LAYERS,
    ms.ModelCondition(
        "mindspeed.pipeline.conditions:foreign_modules",
        "the model has no Transformer Engine linear layers and no fully sharded parameters",
    ),
)
"""Conditions of every feature whose schedule has separate operations for weight gradients."""

NO_SHARDED_MODEL: Final = ms.ModelCondition(
    "mindspeed.pipeline.conditions:sharded_modules",
    "the model has no fully sharded parameters, which a repeated forward pass would have to gather",
)


@ms.condition(
    "the pattern of a hybrid model already assigns layers to pipeline stages",
    fix=(ms.Fix.advise("separate uneven stages with | in the pattern"), ms.Fix.remove_feature()),
)
def layers_have_no_pattern(args: Any, world: ms.World) -> bool:
    """Check that the model is no HybridModel, which has no layout but its pattern."""
    return not world.is_hybrid


_GATHERED: Final = "fully sharded parameters are gathered in the order of Megatron's schedule"
_FUSED: Final = "linear layers of Transformer Engine compute both gradients at once"
_SHARDED: Final = {
    "megatron.core.distributed.fsdp": _GATHERED,
    "megatron.core.distributed.torch_fully_sharded_data_parallel": _GATHERED,
}
_FOREIGN: Final = {"megatron.core.extensions.transformer_engine": _FUSED, "transformer_engine": _FUSED, **_SHARDED}
"""Packages of modules, and the reason against them."""


def foreign_modules(feature: ms.Feature[Any], chunks: Iterable[Any]) -> list[str]:
    """Return a sentence for each class of linear layer or of sharded parameters that splits no backward pass."""
    return _found(chunks, _FOREIGN)


def sharded_modules(feature: ms.Feature[Any], chunks: Iterable[Any]) -> list[str]:
    """Return a sentence for each class of sharded parameters, which are missing when a forward pass is repeated early."""
    return _found(chunks, _SHARDED)


def _found(chunks: Iterable[Any], packages: Mapping[str, str]) -> list[str]:
    kinds = {type(module) for chunk in chunks for module in chunk.modules() if next(module.parameters(False), None) is not None}
    kinds |= {type(chunk) for chunk in chunks}
    return sorted(
        f"the model has {kind.__qualname__}: {reason}"
        for kind in kinds
        for package, reason in packages.items()
        if f"{kind.__module__}.".startswith(f"{package}.") and ("Linear" in kind.__name__ or "Parallel" in kind.__name__)
    )
