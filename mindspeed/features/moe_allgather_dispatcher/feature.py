"""All-gather dispatcher whose gathers are posted before the first wait."""

from __future__ import annotations

from mindspeed import plugins as ms
from mindspeed.moe.conditions import DISPATCHER_CONDITIONS, REORDERED, DispatcherFeature, needs_dispatcher
from mindspeed.plugins.shared_conditions import has_experts


class MoeAllgatherDispatcher(DispatcherFeature[ms.FeatureArgs]):
    """Gather tokens and top-k routes asynchronously.

    Replaces Megatron's all-gather dispatcher. Per token, only the ids and probabilities of the k selected experts are
    gathered instead of those of all experts. All gathers start before the first one is waited for.
    """

    target = "MoEAllGatherTokenDispatcher"
    mixin = "mindspeed.moe.dispatchers:AllGatherDispatch"
    spec = ms.FeatureSpec(
        name="moe-allgather-dispatcher",
        category=ms.Category.MOE,
        slots={"token-permutation"},
        constraints=(
            ms.Requires(
                "expert-parallel",
                reason="moe-allgather-dispatcher replaces Megatron's all-gather dispatcher, which expert-parallel selects",
                settings={"dispatcher": "allgather"},
            ),
            has_experts,
            needs_dispatcher("allgather"),
            *DISPATCHER_CONDITIONS,
            ms.Condition.unset("padded_experts", "expert inputs are padded to a capacity, which {feature} does not support"),
        ),
        numerics=REORDERED,
        own_trainer='from mindspeed.nn import MoE  # dispatcher="allgather"',
    )
