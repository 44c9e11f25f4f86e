"""All-gather dispatcher whose gathers are posted before the first wait."""

from __future__ import annotations

from mindspeed.moe.conditions import DISPATCHER_CONDITIONS, needs_dispatcher
from mindspeed.moe.feature import REORDERED, DispatcherFeature
from mindspeed.plugins import Category, FeatureArgs, FeatureSpec, Requires, unset
from mindspeed.plugins.shared_conditions import has_experts


class MoeAllgatherDispatcher(DispatcherFeature[FeatureArgs]):
    """Gather tokens and top-k routes asynchronously.

    Each token has k experts and probabilities instead of all. All gathers are posted before the first wait.
    """

    target = "MoEAllGatherTokenDispatcher"
    mixin = "mindspeed.moe.dispatchers:AllGatherDispatch"
    spec = FeatureSpec(
        name="moe-allgather-dispatcher",
        category=Category.MOE,
        slots={"token-permutation"},
        constraints=(
            Requires(
                "expert-parallel",
                reason="it replaces the all-gather dispatcher",
                settings={"dispatcher": "allgather"},
            ),
            has_experts,
            needs_dispatcher("allgather"),
            *DISPATCHER_CONDITIONS,
            unset("padded_experts", "experts are padded to their capacity, which {feature} does not support"),
        ),
        numerics=REORDERED,
    )
