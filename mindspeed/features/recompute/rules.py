"""Name the settings of recompute, and check which of them fit a model. Light."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final, Literal

from pydantic import model_validator

from mindspeed import plugins as ms
from mindspeed.memory.conditions import groups_fill_chunks, modules_have_experts
from mindspeed.plugins.constraints import Constraint
from mindspeed.plugins.shared_conditions import NO_CPU_OFFLOADING, NO_OVERLAPPED_MICRO_BATCHES

Module = Literal["core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts"]


class RecomputeArgs(ms.FeatureArgs):
    granularity: Literal["selective", "full"] = ms.Field(
        "selective", description="What to recompute: selective (only the modules in recompute.modules) or full (whole layers)"
    )
    modules: tuple[Module, ...] | None = ms.Field(
        None, min_length=1, description="With selective granularity: the modules that are recomputed (default: core_attn)"
    )
    method: Literal["uniform", "block"] | None = ms.Field(
        None,
        description="With full granularity: uniform = recompute all layers in groups of num_layers; block = recompute only "
        "the first num_layers of each model chunk",
    )
    num_layers: int | None = ms.Field(
        None,
        ge=1,
        description="With full granularity: number of layers per group (method uniform), or number of recomputed layers per "
        "model chunk (method block). In a HybridModel, each character of the pattern is a layer",
    )
    per_rank: bool = ms.Field(
        False,
        description="With method block: num_layers counts the layers of a pipeline rank, dealt out to its chunks in turn. "
        "false = the layers of each model chunk",
    )
    distribute: bool = ms.Field(
        False,
        description="With full granularity: split the saved inputs of layers over the tensor-parallel ranks. Saves memory, "
        "adds an all-gather in backward",
    )

    @model_validator(mode="after")
    def _settings_fit_granularity(self) -> RecomputeArgs:
        needed: dict[str, str | int] = {"method": "uniform", "num_layers": 1} if self.granularity == "full" else {}
        if missing := [name for name in needed if getattr(self, name) is None]:
            text = f"granularity=full needs {' and '.join(missing)}"
            raise ms.SettingsError(text, ms.Fix.together(tuple(ms.Fix.give_setting(name, needed[name]) for name in missing)))
        other = "selective" if self.granularity == "full" else "full"
        of_other = ("modules",) if other == "selective" else ("method", "num_layers", "per_rank", "distribute")
        if given := [name for name in of_other if getattr(self, name)]:
            text = f"{' and '.join(given)} can be set only with granularity={other}, but granularity is {self.granularity}"
            drop = ms.Fix.together(tuple(ms.Fix.drop_setting(name) for name in given))
            raise ms.SettingsError(text, drop, ms.Fix.give_setting("granularity", other))
        return self


def _takes(args: RecomputeArgs, module: Module) -> bool:
    return args.granularity == "selective" and module in (args.modules or ("core_attn",))


def _modules_without(module: Module) -> Callable[[RecomputeArgs, ms.World], dict[str, str]]:
    """Return a function that gives the value of ``modules`` without one of them."""

    def others(args: RecomputeArgs, world: ms.World) -> dict[str, str]:
        left = [name for name in args.modules or () if name != module]
        return {"others": f"[{','.join(left) or 'core_attn'}]"}

    return others


def is_full(args: RecomputeArgs, world: ms.World) -> bool:
    """Return whether whole layers are recomputed."""
    return args.granularity == "full"


def _is_uniform(args: RecomputeArgs, world: ms.World) -> bool:
    """Return whether all layers are recomputed, in groups."""
    return args.method == "uniform"


def _is_block(args: RecomputeArgs, world: ms.World) -> bool:
    """Return whether a number of layers of each chunk is recomputed."""
    return args.method == "block" and not args.per_rank


def _is_distributed(args: RecomputeArgs, world: ms.World) -> bool:
    """Return whether saved inputs are split over tensor-parallel ranks."""
    return args.distribute


def _takes_experts(args: RecomputeArgs, world: ms.World) -> bool:
    """Return whether routed or shared experts are recomputed."""
    return _takes(args, "moe") or _takes(args, "shared_experts")


def _takes_moe(args: RecomputeArgs, world: ms.World) -> bool:
    """Return whether MoE layers are recomputed."""
    return _takes(args, "moe")


def _takes_shared_experts(args: RecomputeArgs, world: ms.World) -> bool:
    """Return whether shared experts are recomputed."""
    return _takes(args, "shared_experts")


def _takes_expert_activation(args: RecomputeArgs, world: ms.World) -> bool:
    """Return whether the activation of grouped experts is recomputed."""
    return _takes(args, "moe_act")


def _takes_latent_projection(args: RecomputeArgs, world: ms.World) -> bool:
    """Return whether the up-projection of multi-latent attention is recomputed."""
    return _takes(args, "mla_up_proj")


@ms.condition(
    "recompute.num_layers={args.num_layers} is greater than the number of layers of a model chunk "
    "({world.num_layers} layers / pp={world.pp} / vpp={world.vpp}), so every layer is recomputed. "
    "Give a smaller number to recompute fewer layers",
    when=_is_block,
    otherwise="warn",
)
def chunks_have_the_layers(args: RecomputeArgs, world: ms.World) -> bool:
    """Check that a model chunk has as many layers as are to be recomputed."""
    return args.num_layers is None or args.num_layers <= max(world.layers_per_chunk)


@ms.condition(
    "moe_act recomputes the activation of grouped experts, but the model has none (for other experts and MLPs, "
    "activation-recompute does this)",
    fix=(ms.Fix.give_setting("modules", "{others}"),),
    values=_modules_without("moe_act"),
    when=_takes_expert_activation,
)
def experts_are_grouped(args: RecomputeArgs, world: ms.World) -> bool:
    """Check that the model has grouped experts."""
    return bool(world.num_experts > 0 and world.grouped_experts)


@ms.condition(
    "mla_up_proj is part of multi-latent attention, but the model does not use it",
    fix=(ms.Fix.give_setting("modules", "{others}"),),
    values=_modules_without("mla_up_proj"),
    when=_takes_latent_projection,
)
def attention_is_latent(args: RecomputeArgs, world: ms.World) -> bool:
    """Check that attention is multi-latent."""
    return bool(world.multi_latent_attention)


_HIDING: Final = (
    "shared experts cannot be recomputed while they overlap with transfers; remove shared_experts from recompute.modules to "
    "use both features"
)
CONSTRAINTS: Final[tuple[Constraint, ...]] = (
    replace(groups_fill_chunks, when=_is_uniform),
    chunks_have_the_layers,
    ms.Condition.at_least(
        "tp",
        2,
        "distribute=true splits saved inputs over tensor-parallel ranks, but tp is {world.tp}",
        fix=(ms.Fix.give_setting("distribute", False), ms.Fix.give_field("tp", 2, or_more=True)),
        when=_is_distributed,
    ),
    replace(modules_have_experts, when=_takes_experts),
    experts_are_grouped,
    attention_is_latent,
    NO_CPU_OFFLOADING,
    replace(NO_OVERLAPPED_MICRO_BATCHES, when=is_full),
    ms.Conflicts(
        "moe-zero-memory",
        reason="recompute.granularity=full already recomputes the experts, as a part of whole layers",
        when=is_full,
    ),
    ms.Conflicts(
        "moe-zero-memory",
        reason="moe in recompute.modules makes both features recompute the experts. To use both, remove moe from this setting",
        when=_takes_moe,
    ),
    ms.Conflicts(
        "moe-zero-memory",
        reason="moe_act in recompute.modules makes both features recompute the activation of experts. To use both, remove "
        "moe_act from this setting",
        when=_takes_expert_activation,
    ),
    ms.Conflicts("moe-allgather-overlap", reason=_HIDING, when=_takes_shared_experts),
    ms.Conflicts("moe-alltoall-overlap", reason=_HIDING, when=_takes_shared_experts),
    ms.Conflicts(
        "sequence-parallel",
        reason="recompute.distribute=true splits saved inputs over tensor-parallel ranks, which sequence-parallel already does",
        when=_is_distributed,
        fix=(ms.Fix.give_setting("distribute", False),),
    ),
)
