"""Activations recomputed in the backward pass instead of kept."""

from __future__ import annotations

from typing import Any, Literal, get_args

from mindspeed.plugins import (
    ArgOverride,
    Category,
    Check,
    Conflicts,
    Feature,
    FeatureArgs,
    FeatureSpec,
    Field,
    MegatronFlag,
    MindSpeedError,
    Numerics,
    Problem,
    Slot,
    hookimpl,
)

Module = Literal["core_attn", "mlp", "moe", "shared_experts"]


class RecomputeArgs(FeatureArgs):
    granularity: Literal["selective", "full"] = Field("selective", description="chosen modules, or whole layers")
    modules: tuple[Module, ...] | None = Field(None, min_length=1, description="selective: the modules; core_attn if not given")
    method: Literal["uniform", "block"] | None = Field(
        None, description="full: all layers in groups (uniform), or each of the first layers of a chunk (block)"
    )
    num_layers: int | None = Field(None, ge=1, description="layers per group (uniform), or recomputed layers per chunk (block)")
    distribute: bool = Field(False, description="full: keep the saved inputs of layers split over the tensor-parallel ranks")


def _full(args: RecomputeArgs, world: object) -> bool:
    return args.granularity == "full"


def _selective(args: RecomputeArgs, world: object) -> bool:
    return args.granularity == "selective"


class Recompute(Feature[RecomputeArgs]):
    """Keep only the inputs of modules or layers, and run their forward again when backward needs the rest."""

    spec = FeatureSpec(
        name="recompute",
        summary="Full, block-wise or selective recomputation of activations in the backward pass",
        category=Category.MEGATRON,
        level=0,
        slots={Slot.RECOMPUTE_POLICY},
        slots_when=_full,
        constraints=(
            Check(
                lambda args, world: args.method is not None,
                "full recompute needs a method",
                fix="--set recompute.method=uniform",
                when=_full,
            ),
            Check(
                lambda args, world: args.num_layers is not None,
                "full recompute needs a number of layers",
                fix="--set recompute.num_layers=1",
                when=_full,
            ),
            Check(
                lambda args, world: args.modules is None,
                "modules are chosen for selective recompute only",
                fix="drop recompute.modules, or --set recompute.granularity=selective",
                when=_full,
            ),
            Check(
                lambda args, world: args.method is None,
                "the method {args.method} is for full recompute only",
                fix="drop recompute.method, or --set recompute.granularity=full",
                when=_selective,
            ),
            Check(
                lambda args, world: args.num_layers is None,
                "a number of layers is for full recompute only",
                fix="drop recompute.num_layers, or --set recompute.granularity=full",
                when=_selective,
            ),
            Check(
                lambda args, world: not args.distribute,
                "saved inputs are distributed by full recompute only",
                fix="--set recompute.distribute=false, or --set recompute.granularity=full",
                when=_selective,
            ),
            Check(
                lambda args, world: world.num_layers // (world.pp * world.vpp) % args.num_layers == 0,
                "groups of {args.num_layers} layers do not fill a model chunk, "
                "which has {world.num_layers} layers / (pp x vpp = {world.pp} x {world.vpp})",
                fix="--set recompute.num_layers=1, or another divisor of the layers of a chunk",
                when=lambda args, world: _full(args, world) and args.method == "uniform" and args.num_layers is not None,
            ),
            Check(
                lambda args, world: args.num_layers <= world.num_layers // (world.pp * world.vpp),
                "num_layers={args.num_layers} is more than a model chunk has, which is {world.num_layers} layers / "
                "(pp x vpp = {world.pp} x {world.vpp}): every layer is recomputed",
                when=lambda args, world: _full(args, world) and args.method == "block" and args.num_layers is not None,
                warns=True,
            ),
            Check(
                lambda args, world: world.tp > 1,
                "saved inputs are distributed over tensor-parallel ranks, and there is {world.tp}",
                fix="--set recompute.distribute=false, or --tp 2 or more",
                when=lambda args, world: args.distribute and _full(args, world),
            ),
            Check(
                lambda args, world: world.num_experts > 0,
                "moe and shared_experts are modules of a MoE model, and this one is dense",
                fix="remove moe and shared_experts from recompute.modules",
                when=lambda args, world: not {"moe", "shared_experts"}.isdisjoint(args.modules or ()),
            ),
            Conflicts(
                "sequence-parallel",
                reason="the saved inputs are already a share of the sequence; set recompute.distribute=false",
                when=lambda args, world: args.distribute,
            ),
        ),
        megatron_flags=(
            MegatronFlag("recompute_granularity", "granularity", switch="on"),
            MegatronFlag("recompute_activations", switch="on"),
            *(MegatronFlag(f"recompute_{setting}", setting) for setting in ("method", "num_layers")),
            MegatronFlag("recompute_modules", "modules", takes=get_args(Module)),
            MegatronFlag("distribute_saved_activations", "distribute"),
        ),
        numerics=Numerics.exact(),
    )

    @hookimpl
    def megatron_args(self) -> list[ArgOverride]:
        overrides = [
            ArgOverride(f"recompute_{name}", value, f"recompute.{name}")
            for name in ("granularity", "modules", "method", "num_layers")
            if (value := getattr(self.args, name)) is not None
        ]
        if self.args.distribute:
            overrides.append(ArgOverride("distribute_saved_activations", True, "recompute.distribute is set"))
        return overrides

    @hookimpl
    def config_ready(self, config: Any) -> None:
        if "mlp" in (self.args.modules or ()) and config.add_bias_linear:
            text = "recompute: Megatron cannot recompute an MLP with biases, its backward pass never ends"
            fix = "remove mlp from recompute.modules, or build the model with add_bias_linear=False"
            raise MindSpeedError([Problem("MS304", text, ("recompute",), fix=fix)])
