"""Adaptive context parallelism in Megatron."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from pydantic import model_validator

from mindspeed import plugins as ms
from mindspeed.context_parallel.conditions import degree_splits_heads, degree_splits_ranks, predicts_one_token
from mindspeed.context_parallel.costs import Attention, compact_inputs, with_blocks, with_heads_exchanged
from mindspeed.context_parallel.feature import ALGORITHM, TwoLevelFeature, any_length, sliced_by
from mindspeed.plugins.saved_tensors import SavedTensors

if TYPE_CHECKING:
    from mindspeed.context_parallel.core_attention import CoreAttention
    from mindspeed.features.adaptive_cp.plans import Plans


_SHARED_MASK: Final = ms.Fix.together((ms.Fix.add_feature("shared-attention-mask"), ms.Fix.give_setting("dynamic_mask", False)))


class AdaptiveCpArgs(ms.FeatureArgs):
    only_reschedule: bool = ms.Field(
        False,
        description="Balance only by choosing the rank that computes each block of the mask (true), or also by reordering "
        "the tokens (false)",
    )
    coarse: int = ms.Field(
        1024,
        ge=1,
        description="For the search for a balanced token order, the mask is divided into at most N x N blocks, where N is this "
        "number. Larger = better balance, slower search",
    )
    without_coarse: bool = ms.Field(
        False,
        description="Search for a balanced token order that moves single tokens (slower), instead of blocks of tokens. The "
        "number of blocks, the setting coarse, is then ignored",
    )
    dynamic_mask: bool = ms.Field(
        False,
        description="true = read the mask from each batch. When the mask changes, choose again which rank computes each "
        "block of the mask; tokens are not reordered. false = use one mask for the whole run",
    )
    ulysses_degree: int = ms.Field(
        1,
        ge=1,
        description="Number of neighbouring ranks that exchange tokens for attention heads by all-to-all (Ulysses); 1 = no "
        "exchange",
    )
    own_masks: bool = ms.Field(
        False,
        description="Must be false. MindSpeed's flag --adaptive-cp-manually-set-mask-list sets it to true, for mask functions "
        "that are edited in MindSpeed's source. These are not supported: set shared-attention-mask.kind to the name of a "
        "mask that a package adds",
    )

    @model_validator(mode="after")
    def masks_are_named(self) -> AdaptiveCpArgs:
        """Refuse masks of functions that are edited in place."""
        if self.own_masks:
            drop, note = ms.Fix.drop_setting("own_masks"), "N = a mask that a package adds"
            raise ms.SettingsError(
                "own_masks needs mask functions that are edited in MindSpeed's source, which is not supported",
                drop,
                ms.Fix.together((drop, ms.Fix.give_setting("shared-attention-mask.kind", note=note))),
            )
        return self


def reads_masks(args: AdaptiveCpArgs, world: ms.World) -> bool:
    """Return whether the mask comes from each batch (dynamic_mask)."""
    return args.dynamic_mask


def has_one_mask(args: AdaptiveCpArgs, world: ms.World) -> bool:
    """Return whether all batches share one mask."""
    return not args.dynamic_mask


@ms.condition(
    "{feature} computes a schedule for each batch's mask on the CPU, but layers are captured as CUDA graphs, which repeat "
    "only GPU work. With dynamic_mask=false, all batches share one mask and its schedule",
    fix=(ms.Fix.give_field("cuda_graphs", False), _SHARED_MASK),
    when=reads_masks,
)
def plans_outside_of_graphs(args: AdaptiveCpArgs, world: ms.World) -> bool:
    """Check that layers whose schedule follows from a mask are not captured."""
    return not world.cuda_graphs


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
                reason="with dynamic_mask=true the mask comes from each batch and is not shared",
                when=reads_masks,
                fix=(ms.Fix.give_setting("dynamic_mask", False),),
            ),
            ms.Condition.at_most(
                "pp",
                2,
                "only the first and the last pipeline stage receive the mask of a batch, but {feature} needs it in "
                "all {world.pp} stages",
                fix=(ms.Fix.give_field("pp", 2, "or less"), _SHARED_MASK),
                when=reads_masks,
            ),
            plans_outside_of_graphs,
            degree_splits_ranks,
            degree_splits_heads,
        ),
        numerics=ms.Numerics.reordered(reason="the softmax is summed block by block"),
        own_trainer='from mindspeed.nn import ContextParallelAttention  # algorithm="adaptive"',
    )

    def kept(self, tensors: SavedTensors, a: Attention) -> SavedTensors:
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
