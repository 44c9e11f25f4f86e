"""All-gather dispatcher whose gathers are posted before the first wait."""

from __future__ import annotations

from typing import Final

from mindspeed.moe.feature import REORDERED, DispatcherFeature, is_set, needs_experts, unserved
from mindspeed.plugins import Category, Check, FeatureArgs, FeatureSpec, Requires

NAME: Final = "moe-allgather-dispatcher"


class MoeAllgatherDispatcher(DispatcherFeature[FeatureArgs]):
    """All gathers are posted before the first wait; experts and probabilities travel as k numbers per token."""

    kind = "allgather"
    target = "MoEAllGatherTokenDispatcher"
    mixin = "mindspeed.moe.dispatchers:AllGatherDispatch"
    spec = FeatureSpec(
        name=NAME,
        summary="All-gather dispatcher with asynchronous gathers, and k experts and probabilities per token instead of all",
        category=Category.MOE,
        slots={"token-permutation"},
        constraints=(
            Requires(
                "expert-parallel",
                reason="it is the all-gather dispatcher that is exchanged",
                settings={"dispatcher": "allgather"},
            ),
            needs_experts(NAME),
            *unserved(NAME),
            Check(
                lambda args, world: not is_set(world, "padded_experts"),
                "experts are padded to their capacity, and gathered tokens have no such rows",
                fix=f"--no-padded-experts (Megatron-LM: no --moe-pad-expert-input-to-capacity), or remove {NAME}",
            ),
        ),
        numerics=REORDERED,
    )
