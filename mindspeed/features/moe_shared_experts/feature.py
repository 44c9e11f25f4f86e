"""Experts that every token goes to, beside those that the router chooses."""

from __future__ import annotations

from typing import Any, Literal

from mindspeed.plugins import (
    ArgOverride,
    Category,
    Check,
    Feature,
    FeatureArgs,
    FeatureSpec,
    Field,
    MegatronFlag,
    MindSpeedError,
    Numerics,
    Problem,
    VerifyWith,
    World,
    hookimpl,
)


class MoeSharedExpertsArgs(FeatureArgs):
    count: int | None = Field(None, ge=1, description="shared experts, each as wide as one that is routed to")
    size: int | None = Field(None, ge=1, description="width of the shared experts together, instead of a count")
    gate: Literal["none", "scalar", "hidden", True] = Field(
        "none",
        description="weigh their answer for each token: not, by one number (true is the same), or by one per hidden value",
    )
    overlap: bool = Field(False, description="compute them under the all-to-alls of Megatron's dispatcher")


def _width(args: MoeSharedExpertsArgs, world: World) -> dict[str, int]:
    if args.count is not None:
        return {"shared_expert_hidden_size": args.count * world.moe_ffn_hidden_size}
    return {"shared_expert_hidden_size": args.size} if args.size is not None else {}


class MoeSharedExperts(Feature[MoeSharedExpertsArgs]):
    """A MLP for all tokens beside the routed experts, optionally weighed by a gate."""

    spec = FeatureSpec(
        name="moe-shared-experts",
        summary="Experts for every token beside the routed ones, with an optional gate",
        category=Category.MOE,
        level=0,
        constraints=(
            Check(
                lambda args, world: world.num_experts > 0,
                "there are no routed experts to stand beside, the model is dense",
                fix="--num-experts N, or remove moe-shared-experts",
            ),
            Check(
                lambda args, world: not world.linear_bias,
                "linear layers have biases, and Megatron's shared experts have none",
                fix="--no-linear-bias (Megatron-LM: --disable-bias-linear), or remove moe-shared-experts",
            ),
            Check(
                lambda args, world: args.count is not None or args.size is not None,
                "neither a number of shared experts nor their size is given",
                fix="--set moe-shared-experts.count=1",
            ),
            Check(
                lambda args, world: args.size == args.count * world.moe_ffn_hidden_size,
                "{args.count} experts of {world.moe_ffn_hidden_size} are not {args.size} wide",
                fix="drop moe-shared-experts.count, or moe-shared-experts.size",
                when=lambda args, world: args.count is not None and args.size is not None,
            ),
            Check(
                lambda args, world: world.shared_expert_hidden_size == args.count * world.moe_ffn_hidden_size,
                "{args.count} experts of {world.moe_ffn_hidden_size} are not {world.shared_expert_hidden_size} wide",
                fix="drop moe-shared-experts.count, or --shared-expert-hidden-size",
                when=lambda args, world: args.count is not None and args.size is None,
            ),
            Check(
                lambda args, world: world.shared_expert_hidden_size == args.size,
                "shared experts are {args.size} wide by a setting, and {world.shared_expert_hidden_size} by the model",
                fix="drop moe-shared-experts.size, or --shared-expert-hidden-size",
                when=lambda args, world: args.size is not None and args.count is None,
            ),
        ),
        model=_width,
        megatron_flags=(
            MegatronFlag("moe_shared_expert_intermediate_size", "size"),
            MegatronFlag("moe_shared_expert_overlap", "overlap"),
        ),
        numerics=Numerics.reordered(reason="with overlap gradients of a layer's input are added in another order"),
        reference={"overlap": False},
        verify_with=VerifyWith(settings={"moe-shared-experts": {"count": 1, "overlap": True}}, world={"ep": 2}),
    )

    @hookimpl
    def megatron_args(self) -> list[ArgOverride]:
        overrides = []
        if self.args.size is not None:
            overrides.append(ArgOverride("moe_shared_expert_intermediate_size", self.args.size, "moe-shared-experts.size"))
        if self.args.overlap:
            overrides.append(ArgOverride("moe_shared_expert_overlap", True, "moe-shared-experts.overlap"))
        return overrides

    @hookimpl
    def config_ready(self, config: Any) -> None:
        if not config.num_moe_experts:
            return
        if self.args.count is not None:
            size, given = self.args.count * config.moe_ffn_hidden_size, config.moe_shared_expert_intermediate_size
            if given not in (None, size):
                name, width = self.spec.name, config.moe_ffn_hidden_size
                text = f"{name}: {self.args.count} experts of {width} are {size} wide, and their size is {given}"
                raise MindSpeedError([Problem("MS304", text, (name,), fix="drop moe-shared-experts.count, or the size")])
            config.moe_shared_expert_intermediate_size = size
        if self.args.gate != "none" and hasattr(config, "moe_shared_expert_gate"):
            config.moe_shared_expert_gate = True

    @hookimpl
    def layer_spec(self, spec: Any, config: Any) -> Any:
        if self.args.gate == "none" or not config.num_moe_experts:
            return spec
        from mindspeed.features.moe_shared_experts.layers import with_gate

        return with_gate(spec, hidden=self.args.gate == "hidden", by_config=hasattr(config, "moe_shared_expert_gate"))
