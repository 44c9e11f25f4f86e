"""Linear position bias in Megatron."""

from __future__ import annotations

from typing import Any, Literal

from mindspeed.plugins import (
    Advice,
    After,
    ArgOverride,
    Capability,
    Category,
    Check,
    CheckpointState,
    Conflicts,
    Feature,
    FeatureArgs,
    FeatureSpec,
    Field,
    GiveField,
    Numerics,
    Requires,
    RequiresCapability,
    Slot,
    hookimpl,
)


class AlibiArgs(FeatureArgs):
    fused: bool = Field(
        True, description="in the attention operator; otherwise Megatron's own core attention has it added to its scores"
    )
    fused_type: Literal[0, 2, 3] | None = Field(
        None,
        description="how the operator gets it: 0 a matrix, 2 a slope for each head and the distance, 3 slopes and the root of "
        "the distance; if not given, 2, or 0 where another setting takes a matrix",
    )
    square: bool = Field(False, description="slope * (key - query), which differs from the distance where later keys are seen")
    opposite: bool = Field(False, description="the same as square, by its name beside fused_type 0")
    fill: bool = Field(False, description="-inf for keys after the query, whatever the mask says")

    @property
    def signed(self) -> bool:
        return self.square or self.opposite

    @property
    def kind(self) -> int:
        """``fused_type``, chosen where it is not given."""
        return self.fused_type if self.fused_type is not None else 0 if self.signed or self.fill else 2


class Alibi(Feature[AlibiArgs]):
    """Scores of attention get ``-slope * |query - key|``, with a slope for each head, in the place of a position embedding."""

    spec = FeatureSpec(
        name="alibi",
        summary="Positions by a linear bias on attention scores, also under context parallelism",
        category=Category.SCENARIO,
        constraints=(
            Requires(
                "flash-attention",
                reason="its operator takes the bias",
                when=lambda args, world: args.fused and world.cp == 1,
            ),
            Conflicts(
                "flash-attention",
                reason="with alibi.fused=false Megatron's own core attention has the scores; --without flash-attention",
                when=lambda args, world: not args.fused,
            ),
            RequiresCapability(Slot.CONTEXT_PARALLEL, Capability.POSITION_BIAS, reason="the model has no other positions"),
            After("flash-attention"),
            After(Slot.CONTEXT_PARALLEL),
            Check(
                lambda args, world: not world.rotary,
                "the positions of the model are rotary, and a bias on scores takes their place",
                fix=(GiveField("rotary", False),),
            ),
            Check(
                lambda args, world: not world.multi_latent_attention,
                "multi-latent attention has rotary positions, and a bias on scores takes their place",
                fix="--no-multi-latent-attention, or remove alibi",
            ),
            Check(
                lambda args, world: args.kind == 0 or not (args.signed or args.fill),
                "square, opposite and fill take a matrix, and fused_type {args.fused_type} has none",
                fix="--set alibi.fused_type=0",
            ),
            Check(
                lambda args, world: args.fused and args.kind == 2,
                "{world.cp} context-parallel ranks have blocks of scores, whose bias comes from slopes and the distance alone",
                fix=(Advice("remove alibi's settings"), GiveField("cp", 1)),
                when=lambda args, world: world.cp > 1,
            ),
        ),
        applies=lambda args, world: not world.rotary,
        numerics=Numerics.reordered(reason="the bias is added block by block, in the operator"),
        state=CheckpointState(
            "none",
            "weights fit the positions that they were trained with",
            added="refused",
            removed="refused",
            changed="refused",
            settings={"fused": "safe", "fused_type": "convertible"},
        ),
        reference={"fused": False},
    )

    @hookimpl
    def megatron_args(self) -> list[ArgOverride]:
        return [ArgOverride("position_embedding_type", "none", "the bias says where a token is")]

    @hookimpl
    def layer_spec(self, spec: Any, config: Any) -> Any:
        from mindspeed.features.alibi.layers import with_position_bias

        return with_position_bias(spec, config, self.args)
