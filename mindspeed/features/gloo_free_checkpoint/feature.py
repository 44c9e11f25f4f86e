"""Optimizer checkpoints without gloo process groups."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mindspeed import plugins as ms
from mindspeed.plugins.shared_conditions import NO_FSDP


def unsuited_shards(feature: ms.Feature[Any], optimizer: Any) -> Iterator[str]:
    """Yield a sentence for each deviation of a distributed optimizer, chained or not, from one shard in buffers per rank."""
    members = getattr(optimizer, "chained_optimizers", [optimizer])
    configs = [config for member in members if (config := getattr(member, "ddp_config", None)) is not None]
    instances = max((getattr(config, "num_distributed_optimizer_instances", 1) for config in configs), default=1)
    if instances > 1:
        yield f"{instances} instances of the distributed optimizer hold copies of one shard"
    if any(config.use_megatron_fsdp for config in configs):
        yield "Megatron FSDP keeps no optimizer shards in buffers"


_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
_STATE = "mindspeed.features.gloo_free_checkpoint.state"


class GlooFreeCheckpointArgs(ms.FeatureArgs):
    slice: int = ms.Field(
        10_485_760,
        ge=1,
        description="Number of elements of an optimizer shard per message. Smaller = less temporary memory, more messages",
    )


@ms.condition(
    "the optimizer {world.optimizer} has states other than exp_avg and exp_avg_sq, but {feature} saves only these",
    fix=(ms.Fix.give_field("optimizer", "adam"), ms.Fix.remove_feature()),
)
def optimizer_is_adam(args: GlooFreeCheckpointArgs, world: ms.World) -> bool:
    """Check that the optimizer is Adam; one that is not known passes until it is built."""
    return not world.knows("optimizer") or bool(world.optimizer == "adam")


class GlooFreeCheckpoint(ms.Feature[GlooFreeCheckpointArgs]):
    """Save the distributed optimizer without gloo.

    Rank 0 gathers the optimizer shards slice by slice over the device's process groups (NCCL or HCCL) and scatters them
    when loading. The job creates no gloo groups.
    """

    spec = ms.FeatureSpec(
        name="gloo-free-checkpoint",
        category=ms.Category.COMMUNICATION,
        constraints=(
            optimizer_is_adam,
            NO_FSDP,
            ms.ModelCondition(
                "mindspeed.features.gloo_free_checkpoint.feature:unsuited_shards",
                "each optimizer shard is on one rank only, in Megatron's flat buffers",
                subject="optimizer",
            ),
            # Both show main weights and states to a method before it runs.
            ms.Before("reuse-fp32-param"),
            ms.Before("swap-optimizer"),
        ),
        numerics=ms.Numerics.exact(),
        verify_with=ms.VerifyWith(features=("distributed-optimizer",)),
    )

    @ms.hookimpl
    def megatron_args(self) -> list[ms.ArgOverride]:
        return [
            ms.ArgOverride(
                "create_gloo_process_groups",
                False,
                "checkpoints are gathered over NCCL or HCCL, so Megatron needs no gloo groups",
            ),
            ms.ArgOverride(
                "use_gloo_process_groups",
                False,
                "the optimizer gathers its state for checkpoints over NCCL or HCCL instead of gloo",
            ),
        ]

    @ms.hookimpl
    def patches(self) -> list[ms.Patch]:
        return [
            ms.Wrap(
                f"{_OPTIMIZER}.get_parameter_state_dp_zero",
                f"{_STATE}:gathered_state",
                reason="gathers the optimizer shards on rank 0 slice by slice over NCCL or HCCL, where Megatron gathers them "
                "over gloo",
                phase="checkpoint",
                optional=True,
            ),
            ms.Replace(
                f"{_OPTIMIZER}.load_parameter_state_from_dp_zero",
                f"{_STATE}:scatter_state",
                reason="scatters the loaded optimizer state from rank 0 slice by slice over NCCL or HCCL, where Megatron "
                "scatters it over gloo",
                phase="checkpoint",
                optional=True,
            ),
        ]
