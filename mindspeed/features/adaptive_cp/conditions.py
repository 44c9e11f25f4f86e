"""Settings of adaptive context parallelism, and the jobs in which its blocks can be planned."""

from __future__ import annotations

from typing import Final

from pydantic import model_validator

from mindspeed.plugins import (
    AddFeature,
    FeatureArgs,
    Field,
    GiveField,
    GiveSetting,
    SettingsError,
    Together,
    World,
    condition,
)

_SHARED_MASK: Final = Together((AddFeature("shared-attention-mask"), GiveSetting("dynamic_mask", False)))


class AdaptiveCpArgs(FeatureArgs):
    only_reschedule: bool = Field(
        False,
        description="Keep tokens in sequence order and only choose which rank computes which block (true), or "
        "also reorder tokens (false)",
    )
    coarse: int = Field(
        1024,
        ge=1,
        description="Number of blocks per side into which the mask is at most divided for the search of a balanced token order",
    )
    without_coarse: bool = Field(
        False, description="Search for a balanced token order token by token instead of block by block (slower)"
    )
    dynamic_mask: bool = Field(
        False,
        description="Read the mask from each batch, and assign work to ranks again when it changes. Tokens then "
        "keep their sequence order",
    )
    ulysses_degree: int = Field(
        1, ge=1, description="Number of neighbouring ranks that exchange tokens for attention heads (Ulysses); 1 = none"
    )
    own_masks: bool = Field(
        False, description="Not supported; set shared-attention-mask.kind to a function that returns the mask"
    )

    @model_validator(mode="after")
    def masks_are_named(self) -> AdaptiveCpArgs:
        """Refuse masks of functions that are edited in place."""
        if self.own_masks:
            fix = GiveSetting("shared-attention-mask.kind", "package.module:function", "function that returns the mask")
            raise SettingsError(
                "own_masks needs mask functions that are edited in MindSpeed's source, which is not supported", fix
            )
        return self


def reads_masks(args: AdaptiveCpArgs, world: World) -> bool:
    """Return whether the mask comes from each batch (dynamic_mask)."""
    return args.dynamic_mask


def has_one_mask(args: AdaptiveCpArgs, world: World) -> bool:
    """Return whether all batches share one mask."""
    return not args.dynamic_mask


@condition(
    "only the first and the last pipeline stage receive the mask of a batch, but pp is {world.pp}",
    fix=(GiveField("pp", 2, "or less"), _SHARED_MASK),
    when=reads_masks,
)
def stages_get_the_mask(args: AdaptiveCpArgs, world: World) -> bool:
    """Check that there is no stage between the first and the last."""
    return bool(world.pp <= 2)


@condition(
    "layers are captured as CUDA graphs, but {feature} plans the mask of each batch on the CPU",
    fix=(GiveField("cuda_graphs", False), _SHARED_MASK),
    when=reads_masks,
)
def plans_outside_of_graphs(args: AdaptiveCpArgs, world: World) -> bool:
    """Check that layers whose schedule follows from a mask are not captured."""
    return not world.cuda_graphs
