"""All-gather dispatcher whose gathers are posted before the first wait."""

from __future__ import annotations

from typing import Final

from mindspeed.moe.feature import REORDERED, DispatcherFeature, needs_experts
from mindspeed.plugins import Category, FeatureArgs, FeatureSpec, Requires

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
        ),
        numerics=REORDERED,
    )
