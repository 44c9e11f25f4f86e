"""Settings of adaptive context parallelism, and the jobs in which its blocks can be planned."""

from __future__ import annotations

from typing import Final

from pydantic import model_validator

from mindspeed import plugins as ms

_SHARED_MASK: Final = ms.Together((ms.AddFeature("shared-attention-mask"), ms.GiveSetting("dynamic_mask", False)))


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
        "that are edited in MindSpeed's source. These are not supported: set shared-attention-mask.kind to the function of the "
        "mask (package.module:name)",
    )

    @model_validator(mode="after")
    def masks_are_named(self) -> AdaptiveCpArgs:
        """Refuse masks of functions that are edited in place."""
        if self.own_masks:
            fix = ms.GiveSetting("shared-attention-mask.kind", "package.module:function", "function that returns the mask")
            raise ms.SettingsError(
                "own_masks needs mask functions that are edited in MindSpeed's source, which is not supported", fix
            )
        return self


def reads_masks(args: AdaptiveCpArgs, world: ms.World) -> bool:
    """Return whether the mask comes from each batch (dynamic_mask)."""
    return args.dynamic_mask


def has_one_mask(args: AdaptiveCpArgs, world: ms.World) -> bool:
    """Return whether all batches share one mask."""
    return not args.dynamic_mask


@ms.condition(
    "only the first and the last pipeline stage receive the mask of a batch, but {feature} needs it in all {world.pp} stages",
    fix=(ms.GiveField("pp", 2, "or less"), _SHARED_MASK),
    when=reads_masks,
)
def stages_get_the_mask(args: AdaptiveCpArgs, world: ms.World) -> bool:
    """Check that there is no stage between the first and the last."""
    return bool(world.pp <= 2)


@ms.condition(
    "{feature} computes a schedule for each batch's mask on the CPU, but layers are captured as CUDA graphs, which repeat "
    "only GPU work. With dynamic_mask=false, all batches share one mask and its schedule",
    fix=(ms.GiveField("cuda_graphs", False), _SHARED_MASK),
    when=reads_masks,
)
def plans_outside_of_graphs(args: AdaptiveCpArgs, world: ms.World) -> bool:
    """Check that layers whose schedule follows from a mask are not captured."""
    return not world.cuda_graphs
