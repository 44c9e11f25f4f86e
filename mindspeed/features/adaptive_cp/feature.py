"""Adaptive context parallelism in Megatron."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mindspeed import plugins as ms
from mindspeed.context_parallel.conditions import degree_splits_heads, degree_splits_ranks, predicts_one_token
from mindspeed.context_parallel.costs import Attention
from mindspeed.context_parallel.feature import ALGORITHM, TwoLevelFeature
from mindspeed.context_parallel.patches import any_length, sliced_by
from mindspeed.context_parallel.saved import compact_inputs, with_blocks, with_heads_exchanged
from mindspeed.features.adaptive_cp.conditions import (
    AdaptiveCpArgs,
    has_one_mask,
    plans_outside_of_graphs,
    reads_masks,
    stages_get_the_mask,
)

if TYPE_CHECKING:
    from mindspeed.context_parallel.core_attention import CoreAttention
    from mindspeed.features.adaptive_cp.plans import Plans

_LAYERS = "mindspeed.features.adaptive_cp.layers"
_REASON = "the tokens that balance attention work under the mask"


class AdaptiveCp(TwoLevelFeature[AdaptiveCpArgs]):
    """Balance context parallelism for any mask.

    Tokens are assigned to ranks so that every rank has about equal attention work. Key/value blocks that the mask hides
    completely are neither sent nor computed.
    """

    spec = ms.FeatureSpec(
        name="adaptive-cp",
        category=ms.Category.CONTEXT_PARALLEL,
        slots={ms.Slot.CONTEXT_PARALLEL},
        provides={ms.Capability.SHARED_MASK},
        constraints=(
            *ALGORITHM,
            predicts_one_token,
            ms.Requires(
                "shared-attention-mask",
                reason="adaptive-cp balances work for one mask that is known before training (not required with --set "
                "adaptive-cp.dynamic_mask=true, which reads the mask of each batch)",
                when=has_one_mask,
            ),
            ms.Conflicts(
                "shared-attention-mask",
                reason="with dynamic_mask=true the mask comes from each batch; use --set adaptive-cp.dynamic_mask=false for "
                "a shared mask",
                when=reads_masks,
            ),
            stages_get_the_mask,
            plans_outside_of_graphs,
            degree_splits_ranks,
            degree_splits_heads,
        ),
        numerics=ms.Numerics.reordered(reason="the softmax is summed block by block"),
    )

    def kept(self, tensors: ms.SavedTensors, a: Attention) -> ms.SavedTensors:
        if self.args.ulysses_degree > 1:
            return with_heads_exchanged(tensors, a, self.args.ulysses_degree)
        return with_blocks(tensors, a, compact_inputs(a))

    @ms.hookimpl
    def megatron_args(self) -> list[ms.ArgOverride]:
        mask = ms.ArgOverride(
            "create_attention_mask_in_dataloader",
            True,
            "attention reads its mask from each batch, so the data loader must create it",
        )
        return [mask] if self.args.dynamic_mask else []

    plans: Plans
    """Plans of masks that came with batches: a plan follows from its mask alone, so any micro-batch finds its own."""

    @ms.hookimpl
    def groups_created(self, sizes: dict[str, int], get_group: Callable[[str], Any]) -> None:
        from mindspeed.features.adaptive_cp.plans import Plans

        super().groups_created(sizes, get_group)
        self.plans = Plans()

    @ms.hookimpl
    def groups_destroyed(self) -> None:
        from mindspeed.features.adaptive_cp.layers import plan_of_rule

        super().groups_destroyed()
        plan_of_rule.cache_clear()
        self.plans.clear()

    def core_attention(self) -> type[CoreAttention]:
        from mindspeed.features.adaptive_cp.layers import AdaptiveCoreAttention

        return AdaptiveCoreAttention

    def slicing(self) -> list[ms.Patch]:
        return [*sliced_by(f"{_LAYERS}:share_of_batch", f"{_LAYERS}:share_of_table", _REASON), any_length()]
