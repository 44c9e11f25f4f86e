"""All-to-all dispatcher that reads one tensor from the device."""

from __future__ import annotations

from typing import Any

from mindspeed import plugins as ms
from mindspeed.moe.conditions import DISPATCHER_CONDITIONS, REORDERED, DispatcherFeature, needs_dispatcher
from mindspeed.plugins.shared_conditions import has_experts

_DROP = ms.Fix.drop_setting("once_per_rank")


class MoeAlltoallDispatcherArgs(ms.FeatureArgs):
    once_per_rank: bool = ms.Field(
        False,
        description="false = send a token once to each of its experts; true = send a token only once to each rank. A rank "
        "that has several of its experts sums their outputs",
    )


def _sends_once(args: MoeAlltoallDispatcherArgs, world: ms.World) -> bool:
    """Return whether a token is sent once to each rank."""
    return args.once_per_rank


@ms.condition(
    "once_per_rank=true sums the expert outputs of a token on one rank, but tensor-parallel ranks split each expert, so no "
    "rank has complete outputs",
    fix=(ms.Fix.give_setting("expert-parallel.expert_tensor_size", 1), _DROP),
    when=_sends_once,
    of="expert-parallel",
)
def experts_are_whole(args: MoeAlltoallDispatcherArgs, world: ms.World, experts: Any) -> bool:
    """Check that every expert is on one rank."""
    return bool((experts.expert_tensor_size or world.tp) == 1)


class MoeAlltoallDispatcher(DispatcherFeature[MoeAlltoallDispatcherArgs]):
    """Compute all-to-all splits on the device.

    Replaces Megatron's all-to-all dispatcher. Token indices are computed on the device too, so that the host waits for
    the device only once per layer, to read token counts.
    """

    target = "MoEAlltoAllTokenDispatcher"
    mixin = "mindspeed.features.moe_alltoall_dispatcher.layers:Dispatch"
    spec = ms.FeatureSpec(
        name="moe-alltoall-dispatcher",
        category=ms.Category.MOE,
        slots={"token-permutation"},
        constraints=(
            ms.Requires(
                "expert-parallel",
                reason="moe-alltoall-dispatcher replaces Megatron's all-to-all dispatcher, which expert-parallel selects",
                settings={"dispatcher": "alltoall"},
            ),
            has_experts,
            needs_dispatcher("alltoall"),
            *DISPATCHER_CONDITIONS,
            ms.Condition.at_least(
                "ep",
                2,
                "once_per_rank reduces transfers between expert-parallel ranks, but expert parallelism is off (ep={world.ep})",
                fix=(ms.Fix.give_field("ep", 2, or_more=True), _DROP),
                when=_sends_once,
            ),
            ms.Condition.at_least(
                "router_topk",
                2,
                "once_per_rank sends a token once to a rank with several of its experts, but each token has "
                "{world.router_topk} expert",
                fix=(_DROP,),
                when=_sends_once,
            ),
            experts_are_whole,
            ms.Condition.unset(
                "padded_experts",
                "once_per_rank=true sends a token only once to each rank, but expert inputs that are padded to a capacity "
                "(padded_experts) need a copy for each expert",
                fix=(ms.Fix.give_field("padded_experts", False), _DROP),
                when=_sends_once,
            ),
        ),
        numerics=REORDERED,
        own_trainer="from mindspeed.nn import MoE",
    )
