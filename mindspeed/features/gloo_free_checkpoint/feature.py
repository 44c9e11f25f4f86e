"""Optimizer checkpoints without gloo process groups."""

from __future__ import annotations

from typing import Any

from mindspeed.plugins import (
    ArgOverride,
    Before,
    Category,
    Feature,
    FeatureArgs,
    FeatureSpec,
    Field,
    Numerics,
    Patch,
    Replace,
    VerifyWith,
    Wrap,
    hookimpl,
)

_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
_STATE = "mindspeed.features.gloo_free_checkpoint.state"


class GlooFreeCheckpointArgs(FeatureArgs):
    slice: int = Field(10_485_760, ge=1, description="elements of a shard that travel at a time")


class GlooFreeCheckpoint(Feature[GlooFreeCheckpointArgs]):
    """Send the shards of the distributed optimizer to rank 0 and back in slices over the device's own groups."""

    spec = FeatureSpec(
        name="gloo-free-checkpoint",
        summary="Checkpoints of the distributed optimizer in slices over device groups, without gloo groups",
        category=Category.COMMUNICATION,
        constraints=(
            # Both show main weights and states to a method before it runs.
            Before("reuse-fp32-param"),
            Before("swap-optimizer"),
        ),
        numerics=Numerics.exact(),
        verify_with=VerifyWith(features=("distributed-optimizer",)),
    )

    @hookimpl
    def megatron_args(self) -> list[ArgOverride]:
        return [
            ArgOverride("create_gloo_process_groups", False, "no gloo group is needed"),
            ArgOverride("use_gloo_process_groups", False, "no gloo group is there"),
        ]

    @hookimpl
    def patches(self) -> list[Patch]:
        return [
            Wrap(
                f"{_OPTIMIZER}.get_parameter_state_dp_zero",
                f"{_STATE}:gathered_state",
                reason="shards reach rank 0 in slices over the device group",
                phase="checkpoint",
                optional=True,
            ),
            Replace(
                f"{_OPTIMIZER}.load_parameter_state_from_dp_zero",
                f"{_STATE}:scatter_state",
                reason="shards leave rank 0 in slices over the device group",
                phase="checkpoint",
                optional=True,
            ),
        ]

    @hookimpl
    def optimizer_built(self, optimizer: Any) -> None:
        from mindspeed.features.gloo_free_checkpoint.refusals import refusals

        if wrong := refusals(optimizer):
            self.decline(" and ".join(wrong))
