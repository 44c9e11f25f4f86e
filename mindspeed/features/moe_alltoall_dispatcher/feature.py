"""All-to-all dispatcher that reads one tensor from the device."""

from __future__ import annotations

from typing import Any, Final

from mindspeed.moe.feature import REORDERED, DispatcherFeature, is_set, needs_experts, unserved
from mindspeed.plugins import Category, Check, DropSetting, FeatureArgs, FeatureSpec, Field, GiveField, Requires, hookimpl

NAME: Final = "moe-alltoall-dispatcher"


class MoeAlltoallDispatcherArgs(FeatureArgs):
    once_per_rank: bool = Field(
        False, description="send a token once to each rank that has experts of it, and sum what they answer there"
    )


class MoeAlltoallDispatcher(DispatcherFeature[MoeAlltoallDispatcherArgs]):
    """Rows, chunks and splits of the all-to-all dispatcher follow from indices on the device; counts are read once."""

    kind = "alltoall"
    target = "MoEAlltoAllTokenDispatcher"
    mixin = "mindspeed.features.moe_alltoall_dispatcher.layers:Dispatch"
    spec = FeatureSpec(
        name=NAME,
        summary="All-to-all dispatcher whose counts travel early and are read once per layer",
        category=Category.MOE,
        slots={"token-permutation"},
        constraints=(
            Requires(
                "expert-parallel",
                reason="it is the all-to-all dispatcher that is exchanged",
                settings={"dispatcher": "alltoall"},
            ),
            needs_experts(NAME),
            *unserved(NAME),
            Check(
                lambda args, world: world.ep > 1,
                "once_per_rank saves copies of tokens between ranks, and experts are on one rank",
                fix=(GiveField("ep", 2, or_more=True), DropSetting("once_per_rank")),
                when=lambda args, world: args.once_per_rank,
            ),
            Check(
                lambda args, world: world.router_topk > 1,
                "once_per_rank saves copies of a token, and --router-topk 1 sends one",
                fix="drop moe-alltoall-dispatcher.once_per_rank",
                when=lambda args, world: args.once_per_rank,
            ),
            Check(
                lambda args, world, experts: (experts.expert_tensor_size or world.tp) == 1,
                "once_per_rank needs whole experts, and tensor-parallel ranks split them",
                fix="--set expert-parallel.expert_tensor_size=1, or drop moe-alltoall-dispatcher.once_per_rank",
                when=lambda args, world: args.once_per_rank,
                of="expert-parallel",
            ),
            Check(
                lambda args, world: not is_set(world, "padded_experts"),
                "once_per_rank sends pairs of a token and a rank, and experts are padded to their capacity",
                fix="--no-padded-experts, or drop moe-alltoall-dispatcher.once_per_rank",
                when=lambda args, world: args.once_per_rank,
            ),
        ),
        numerics=REORDERED,
    )

    @hookimpl
    def config_ready(self, config: Any) -> None:
        super().config_ready(config)
        if config.num_moe_experts and self.args.once_per_rank and config.moe_pad_expert_input_to_capacity:
            self.decline("once_per_rank is set, and so is moe_pad_expert_input_to_capacity in a model that is being built")
