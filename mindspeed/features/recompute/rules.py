"""Name the settings of recompute, and check which of them fit a model. Light."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal

from mindspeed.plugins import Check, Conflicts, Constraint, FeatureArgs, Field, GiveField, GiveSetting

Module = Literal["core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts"]


class RecomputeArgs(FeatureArgs):
    granularity: Literal["selective", "full"] = Field("selective", description="chosen modules, or whole layers")
    modules: tuple[Module, ...] | None = Field(None, min_length=1, description="selective: the modules; core_attn if not given")
    method: Literal["uniform", "block"] | None = Field(
        None, description="full: all layers in groups (uniform), or each of the first layers of a chunk (block)"
    )
    num_layers: int | None = Field(None, ge=1, description="layers per group (uniform), or recomputed layers per chunk (block)")
    distribute: bool = Field(False, description="full: keep the saved inputs of layers split over the tensor-parallel ranks")


def full(args: RecomputeArgs, world: object) -> bool:
    return args.granularity == "full"


def _groups(args: RecomputeArgs) -> bool:
    return args.granularity == "full" and args.method == "uniform" and args.num_layers is not None


def _selective(args: RecomputeArgs, world: object) -> bool:
    return args.granularity == "selective"


def _uniform(args: RecomputeArgs, world: object) -> bool:
    return full(args, world) and args.method == "uniform"


def _has(module: str) -> Callable[[RecomputeArgs, object], bool]:
    return lambda args, world: _selective(args, world) and module in (args.modules or ("core_attn",))


CONSTRAINTS: Final[tuple[Constraint, ...]] = (
    Check(
        lambda args, world: args.method is not None,
        "full recompute needs a method",
        fix="--set recompute.method=uniform",
        when=full,
    ),
    Check(
        lambda args, world: args.num_layers is not None,
        "full recompute needs a number of layers",
        fix="--set recompute.num_layers=1",
        when=full,
    ),
    Check(
        lambda args, world: args.modules is None,
        "modules are chosen for selective recompute only",
        fix="drop recompute.modules, or --set recompute.granularity=selective",
        when=full,
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
        when=lambda args, world: _groups(args) and not world.layer_split,
    ),
    Check(
        lambda args, world: all(layers % args.num_layers == 0 for layers in world.layer_split),
        "groups of {args.num_layers} layers do not fill every model chunk: they have {world.layer_split} layers",
        fix="--set recompute.num_layers=1, or another common divisor",
        when=lambda args, world: _groups(args) and bool(world.layer_split),
    ),
    Check(
        lambda args, world: args.num_layers <= max(world.layers_per_chunk),
        "num_layers={args.num_layers} is more than a model chunk has, which is {world.num_layers} layers / "
        "(pp x vpp = {world.pp} x {world.vpp}): every layer is recomputed",
        when=lambda args, world: full(args, world) and args.method == "block" and args.num_layers is not None,
        warns=True,
    ),
    Check(
        lambda args, world: world.tp > 1,
        "saved inputs are distributed over tensor-parallel ranks, and there is {world.tp}",
        fix=(GiveSetting("distribute", False), GiveField("tp", 2, or_more=True)),
        when=lambda args, world: args.distribute and full(args, world),
    ),
    Check(
        lambda args, world: world.num_experts > 0,
        "moe and shared_experts are modules of a MoE model, and this one is dense",
        fix="remove moe and shared_experts from recompute.modules",
        when=lambda args, world: not {"moe", "shared_experts"}.isdisjoint(args.modules or ()),
    ),
    Check(
        lambda args, world: world.num_experts > 0 and world.grouped_experts,
        "moe_act is the activation of grouped experts, and this model has none",
        fix="remove moe_act from recompute.modules, or --features activation-recompute",
        when=_has("moe_act"),
    ),
    Check(
        lambda args, world: world.multi_latent_attention,
        "mla_up_proj is a part of multi-latent attention, and this model has none",
        fix="remove mla_up_proj from recompute.modules",
        when=_has("mla_up_proj"),
    ),
    Conflicts("norm-recompute", reason="uniform full recompute takes every layer", when=_uniform),
    Conflicts("activation-recompute", reason="uniform full recompute takes every layer", when=_uniform),
    Conflicts("activation-recompute", reason="recompute.modules has mlp, whose activation is part of it", when=_has("mlp")),
    Conflicts("swap-attention", reason="uniform full recompute takes every layer", when=_uniform),
    Conflicts("swap-attention", reason="recompute.modules has core_attn, which then saves nothing", when=_has("core_attn")),
    Conflicts("moe-zero-memory", reason="full recompute takes the experts as well", when=full),
    Conflicts("moe-zero-memory", reason="recompute.modules has moe, which the experts are a part of", when=_has("moe")),
    Conflicts("moe-zero-memory", reason="recompute.modules has moe_act, which it never keeps", when=_has("moe_act")),
    Conflicts(
        "moe-allgather-overlap",
        reason="shared experts that hide transfers cannot be recomputed",
        when=_has("shared_experts"),
    ),
    Conflicts(
        "moe-alltoall-overlap",
        reason="shared experts that hide transfers cannot be recomputed",
        when=_has("shared_experts"),
    ),
    Conflicts(
        "sequence-parallel",
        reason="the saved inputs are already a share of the sequence; set recompute.distribute=false",
        when=lambda args, world: args.distribute,
    ),
)
