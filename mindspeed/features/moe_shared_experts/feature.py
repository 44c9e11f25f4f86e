"""Experts that process every token, in addition to those that the router selects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from mindspeed import plugins as ms
from mindspeed.moe.conditions import NO_LINEAR_BIAS
from mindspeed.plugins.shared_conditions import has_experts


class MoeSharedExpertsArgs(ms.FeatureArgs):
    count: int | None = ms.Field(
        None, ge=1, description="Number of shared experts, each as wide as a routed expert (alternative to size)"
    )
    size: int | None = ms.Field(None, ge=1, description="FFN hidden size of all shared experts together (alternative to count)")
    gate: Literal["none", "scalar", "hidden", True] = ms.Field(
        "none",
        description="Learned gate that scales the shared experts' output: none, scalar (one factor per token; true = scalar) "
        "or hidden (one factor per hidden unit)",
    )
    overlap: bool = ms.Field(False, description="Overlap shared-expert compute with the all-to-alls of Megatron's dispatcher")


def _overlaps(args: MoeSharedExpertsArgs, world: ms.World) -> bool:
    """Return whether overlap is set."""
    return args.overlap


def width(args: MoeSharedExpertsArgs, world: ms.World) -> int | None:
    """Return the width of the shared experts by the settings; None where it follows from the width of a routed expert."""
    try:
        return args.size if args.count is None else args.count * world.moe_ffn_hidden_size
    except ms.UnknownValue:
        return None


@ms.condition(
    "neither the number (count) nor the width (size) of shared experts is set", fix=(ms.Fix.give_setting("count", 1),)
)
def is_sized(args: MoeSharedExpertsArgs, world: ms.World) -> bool:
    """Check that a number of shared experts or their size is given."""
    return args.count is not None or args.size is not None


def _has_both(args: MoeSharedExpertsArgs, world: ms.World) -> bool:
    """Return whether count and size are both set."""
    return args.count is not None and args.size is not None


@ms.condition(
    "shared experts of total width {args.size} (size) cannot be {args.count} experts (count) of width "
    "{world.moe_ffn_hidden_size} each",
    fix=(ms.Fix.drop_setting("count"), ms.Fix.drop_setting("size")),
    when=_has_both,
)
def count_and_size_agree(args: MoeSharedExpertsArgs, world: ms.World) -> bool:
    """Check that a number and a size of shared experts mean the same width."""
    return bool(args.size == (args.count or 0) * world.moe_ffn_hidden_size)


def _has_one(args: MoeSharedExpertsArgs, world: ms.World) -> bool:
    """Return whether either count or size is set."""
    return (args.count is None) != (args.size is None)


def _with_width(args: MoeSharedExpertsArgs, world: ms.World) -> Mapping[str, object]:
    """Name the width by the settings for a message."""
    return {"width": width(args, world)}


@ms.condition(
    "moe-shared-experts.size (or moe-shared-experts.count x moe_ffn_hidden_size, if only count is set) gives shared experts a "
    "hidden size of {width}, but shared_expert_hidden_size is {world.shared_expert_hidden_size}",
    fix=(ms.Fix.drop_field("shared_expert_hidden_size"), ms.Fix.remove_feature()),
    when=_has_one,
    values=_with_width,
)
def model_has_that_width(args: MoeSharedExpertsArgs, world: ms.World) -> bool:
    """Check that the model has no shared experts yet, or such of the width that the settings say."""
    return not world.is_set("shared_expert_hidden_size") or world.shared_expert_hidden_size == width(args, world)


@ms.condition(
    "overlap needs all-to-alls, but Megatron's dispatcher is {world.dispatcher}",
    fix=(ms.Fix.give_setting("expert-parallel.dispatcher", "alltoall"), ms.Fix.give_setting("overlap", False)),
    when=_overlaps,
)
def transfers_are_alltoalls(args: MoeSharedExpertsArgs, world: ms.World) -> bool:
    """Check that Megatron's dispatcher is the one under whose transfers it computes shared experts."""
    return not world.knows("dispatcher") or world.dispatcher == "alltoall"


class MoeSharedExperts(ms.Feature[MoeSharedExpertsArgs]):
    """Add shared experts that see every token.

    Their outputs are added to those of the routed experts, with an optional gate.
    """

    spec = ms.FeatureSpec(
        name="moe-shared-experts",
        category=ms.Category.MOE,
        level=0,
        constraints=(
            has_experts,
            NO_LINEAR_BIAS,
            is_sized,
            count_and_size_agree,
            model_has_that_width,
            transfers_are_alltoalls,
        ),
        megatron_flags=(
            ms.MegatronFlag("moe_shared_expert_intermediate_size", "size"),
            ms.MegatronFlag("moe_shared_expert_overlap", "overlap"),
        ),
        numerics=ms.Numerics.reordered(
            reason="with the setting overlap, gradients of a layer's input are summed in a different order than without it"
        ),
        reference={"overlap": False},
        verify_with=ms.VerifyWith(settings={"moe-shared-experts": {"count": 1, "overlap": True}}, world={"ep": 2}),
        own_trainer="from mindspeed.nn import MoE  # shared_size=1024",
    )

    @ms.hookimpl
    def job_values(self) -> Mapping[str, Any]:
        size = width(self.args, self.world)
        sized = {} if size is None else {"shared_expert_hidden_size": size}
        return sized | ({"shared_expert_overlap": True} if self.args.overlap else {})

    @ms.hookimpl
    def megatron_args(self) -> list[ms.ArgOverride]:
        overrides, size = [], width(self.args, self.world)
        if size is not None:
            setting = "size" if self.args.count is None else "count"
            overrides.append(
                ms.ArgOverride(
                    "moe_shared_expert_intermediate_size",
                    size,
                    f"moe-shared-experts.{setting} sets the width of shared experts",
                )
            )
        if self.args.overlap:
            overrides.append(
                ms.ArgOverride(
                    "moe_shared_expert_overlap",
                    True,
                    "moe-shared-experts.overlap=true overlaps shared experts with all-to-alls",
                )
            )
        return overrides

    @ms.hookimpl
    def config_ready(self, config: Any) -> None:
        if self.args.count is not None:  # the plan may not know the width of a routed expert
            config.moe_shared_expert_intermediate_size = self.args.count * config.moe_ffn_hidden_size
        if self.args.gate != "none" and hasattr(config, "moe_shared_expert_gate"):
            config.moe_shared_expert_gate = True

    @ms.hookimpl
    def layer_spec(self, spec: Any, config: Any) -> Any:
        if self.args.gate == "none":
            return spec
        from mindspeed.features.moe_shared_experts.layers import with_gate

        return with_gate(spec, hidden=self.args.gate == "hidden", by_config=hasattr(config, "moe_shared_expert_gate"))
