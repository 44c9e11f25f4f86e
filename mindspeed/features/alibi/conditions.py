"""Settings of the bias, and the jobs in which a bias says where tokens are."""

from __future__ import annotations

from dataclasses import replace
from typing import Final, Literal

from pydantic import model_validator

from mindspeed.plugins import (
    FeatureArgs,
    Field,
    GiveField,
    GiveSetting,
    ModelCondition,
    RemoveFeature,
    SettingsError,
    World,
    condition,
    unset,
)
from mindspeed.plugins.shared_conditions import NO_TRANSFORMER_ENGINE_LAYERS


class AlibiArgs(FeatureArgs):
    fused: bool = Field(
        True, description="add the bias in the attention operator, not to the scores of Megatron's core attention"
    )
    fused_type: Literal[0, 2, 3] | None = Field(
        None,
        description="form in which the operator gets the bias: 0 a matrix, 2 a slope per head and the distance, 3 slopes and "
        "the root of the distance (default: 2, or 0 where another setting takes a matrix)",
    )
    square: bool = Field(False, description="slope * (key - query), which differs from the distance where later keys are seen")
    opposite: bool = Field(False, description="same as square, by its name in combination with fused_type 0")
    fill: bool = Field(False, description="set the bias of keys after the query to -inf, whatever the mask is")

    @property
    def signed(self) -> bool:
        return self.square or self.opposite

    @property
    def kind(self) -> int:
        """``fused_type``, chosen where it is not given."""
        return self.fused_type if self.fused_type is not None else 0 if self.signed or self.fill else 2

    @model_validator(mode="after")
    def forms_have_a_matrix(self) -> AlibiArgs:
        """Refuse forms of the bias that need a matrix with a type that has none."""
        if self.kind and (self.signed or self.fill):
            text = f"square, opposite and fill need a matrix, but fused_type {self.fused_type} has none"
            raise SettingsError(text, GiveSetting("fused_type", 0))
        return self


@condition(
    "the positions of the model are rotary, but {feature} replaces position embeddings",
    fix=(GiveField("rotary", False), RemoveFeature()),
)
def positions_are_not_rotary(args: AlibiArgs, world: World) -> bool:
    """Check that no rotary embedding says where a token is."""
    return not world.rotary


def _is_spread(args: AlibiArgs, world: World) -> bool:
    """Return whether a sequence is spread over several ranks."""
    return bool(world.cp > 1)


def _on_one_rank(args: AlibiArgs, world: World) -> bool:
    """Return whether one rank has the whole sequence."""
    return bool(world.cp == 1)


def needs_operator(args: AlibiArgs, world: World) -> bool:
    """Return whether the bias is added in the operator, by the core attention of one rank."""
    return bool(args.fused and world.cp == 1)


def needs_scores(args: AlibiArgs, world: World) -> bool:
    """Return whether the bias is added to scores."""
    return not args.fused


@condition(
    "under cp={world.cp} the bias comes from slopes and the distance alone (fused_type 2, fused)",
    fix=(GiveSetting("fused_type", 2, "without square, opposite and fill"), GiveField("cp", 1)),
    when=_is_spread,
)
def blocks_have_slopes(args: AlibiArgs, world: World) -> bool:
    """Check that blocks of scores get a bias that needs no matrix."""
    return args.fused and args.kind == 2


CONDITIONS: Final = (
    positions_are_not_rotary,
    unset("multi_latent_attention", "multi-latent attention has rotary positions, but {feature} replaces position embeddings"),
    blocks_have_slopes,
    replace(NO_TRANSFORMER_ENGINE_LAYERS, when=_on_one_rank),
    ModelCondition(
        "mindspeed.features.alibi.layers:attention_without_bias",
        "every core attention of the model adds the bias",
        subject="spec",
    ),
)
