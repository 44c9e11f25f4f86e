"""Linear position bias in Megatron."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final, Literal

from pydantic import model_validator

from mindspeed import plugins as ms
from mindspeed.plugins.shared_conditions import NO_TRANSFORMER_ENGINE_LAYERS


class AlibiArgs(ms.FeatureArgs):
    fused: bool = ms.Field(
        True,
        description="Add the bias inside the fused attention operator (true), or to the score matrix of Megatron's core "
        "attention (false)",
    )
    fused_type: Literal[0, 2, 3] | None = ms.Field(
        None,
        description="Bias of the fused operator: 0 = slope x distance as a full matrix, 2 = slope x distance without a "
        "matrix, 3 = slope x sqrt(distance). Default: 2, or 0 if square, opposite or fill is true, which need a matrix",
    )
    square: bool = ms.Field(
        False,
        description="Use the bias slope * (key - query) instead of -slope * |query - key|. Both are equal except for keys "
        "after the query",
    )
    opposite: bool = ms.Field(
        False,
        description="Has the same effect as alibi.square, in spite of its name: the bias is slope * (key - query). MindSpeed's "
        "option --alibi-diagonal-opposite sets it",
    )
    fill: bool = ms.Field(
        False, description="Add -inf to the scores of keys after the query, so that attention is causal whatever mask it gets"
    )

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
            text = f"square, opposite and fill need a bias matrix, but fused_type={self.fused_type} does not use one"
            raise ms.SettingsError(text, ms.Fix.give_setting("fused_type", 0))
        return self


@ms.condition(
    "the model uses rotary positions, but {feature} replaces position embeddings",
    fix=(ms.Fix.give_field("rotary", False), ms.Fix.remove_feature()),
)
def positions_are_not_rotary(args: AlibiArgs, world: ms.World) -> bool:
    """Check that no rotary embedding encodes positions."""
    return not world.rotary


def _is_spread(args: AlibiArgs, world: ms.World) -> bool:
    """Return whether context parallelism is on."""
    return bool(world.cp > 1)


def _on_one_rank(args: AlibiArgs, world: ms.World) -> bool:
    """Return whether context parallelism is off."""
    return bool(world.cp == 1)


def needs_operator(args: AlibiArgs, world: ms.World) -> bool:
    """Return whether the operator adds the bias and cp is 1."""
    return bool(args.fused and world.cp == 1)


def needs_scores(args: AlibiArgs, world: ms.World) -> bool:
    """Return whether the bias is added to scores."""
    return not args.fused


@ms.condition(
    "with cp={world.cp}, {feature} supports only fused=true with fused_type=2 (slope x distance, added without a bias matrix)",
    fix=(
        ms.Fix.give_setting(
            "fused_type", 2, "also --set alibi.fused=true, and remove square, opposite and fill, which need a bias matrix"
        ),
        ms.Fix.give_field("cp", 1),
    ),
    when=_is_spread,
)
def blocks_have_slopes(args: AlibiArgs, world: ms.World) -> bool:
    """Check that blocks of scores get a bias that needs no matrix."""
    return args.fused and args.kind == 2


CONDITIONS: Final = (
    positions_are_not_rotary,
    ms.Condition.unset(
        "multi_latent_attention", "multi-latent attention uses rotary positions, but {feature} replaces position embeddings"
    ),
    blocks_have_slopes,
    replace(NO_TRANSFORMER_ENGINE_LAYERS, when=_on_one_rank),
    ms.ModelCondition(
        "mindspeed.features.alibi.layers:attention_without_bias",
        "every core attention of the model can add the bias",
        subject="spec",
    ),
)


class Alibi(ms.Feature[AlibiArgs]):
    """Add an ALiBi position bias to attention scores.

    ``-slope * |i - j|`` is added to the score of a query at position i and a key at position j, with one slope per head.
    This replaces a position embedding. Works under context parallelism too.
    """

    spec = ms.FeatureSpec(
        name="alibi",
        category=ms.Category.SCENARIO,
        constraints=(
            ms.Requires("flash-attention", reason="the fused operator of flash-attention adds the bias", when=needs_operator),
            ms.Conflicts(
                "flash-attention",
                reason="with alibi.fused=false the bias is added to the scores of Megatron's core attention, which "
                "flash-attention replaces; use --without flash-attention",
                when=needs_scores,
            ),
            ms.RequiresCapability(
                ms.Slot.CONTEXT_PARALLEL,
                ms.Capability.POSITION_BIAS,
                reason="only ring-attention, ulysses-attention, hybrid-attention and kv-allgather-cp have it: they add the "
                "ALiBi bias to attention scores. Without the bias, the model has no position information",
            ),
            ms.After("flash-attention"),
            ms.After(ms.Slot.CONTEXT_PARALLEL),
            *CONDITIONS,
        ),
        numerics=ms.Numerics.reordered(
            reason="attention is computed block by block, so the softmax is summed in a different order"
        ),
        state=ms.CheckpointState(
            "none",
            "weights depend on the kind of position encoding that they were trained with",
            added="refused",
            removed="refused",
            changed="refused",
            settings={"fused": "safe", "fused_type": "convertible"},
        ),
        reference={"fused": False},
        own_trainer="from mindspeed.nn import alibi_slopes",
    )

    @ms.hookimpl
    def notes(self) -> Iterable[str]:
        if self.world.platform != "cuda" or not self.args.fused:
            return []
        return ["attention with a position bias runs the plain-torch reference on cuda, whose flash kernel adds none"]

    @ms.hookimpl
    def megatron_args(self) -> list[ms.ArgOverride]:
        return [ms.ArgOverride("position_embedding_type", "none", "the ALiBi bias replaces position embeddings")]

    @ms.hookimpl
    def layer_spec(self, spec: Any, config: Any) -> Any:
        from mindspeed.features.alibi.layers import with_position_bias

        return with_position_bias(spec, config, self.args)
