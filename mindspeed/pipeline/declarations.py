"""Patches, arguments and settings that features of pipelines share. Light."""

from __future__ import annotations

from typing import Final

from pydantic import Field

from mindspeed.plugins.feature import FeatureArgs
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
