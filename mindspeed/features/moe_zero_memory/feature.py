"""Activations of experts computed again in backward, under the transfers."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import model_validator

from mindspeed.plugins import (
    Category,
    Conflicts,
    Feature,
    FeatureArgs,
    FeatureSpec,
    Field,
    GiveField,
    GiveSetting,
    Numerics,
    Patch,
    RemoveFeature,
    Requires,
    World,
    Wrap,
    condition,
    hookimpl,
)

_OWN = ("moe", "moe_act", "shared_experts")
"""Modules of Megatron's selective recompute whose activations the feature computes again itself."""


class MoeZeroMemoryArgs(FeatureArgs):
    level: Literal["level0", "level1"] = Field(
        "level0",
        description="level0 keeps the first product of experts, level1 their probabilities and the input of shared experts",
    )
    num_layers: int | None = Field(
        None, ge=0, description="level1: layers of a stage that have it, the others have level0; all if not given"
    )

    @model_validator(mode="after")
    def _limits_level1(self) -> MoeZeroMemoryArgs:
        if self.num_layers is not None and self.level != "level1":
            raise ValueError(f"num_layers={self.num_layers} limits level1, and level is {self.level}")
        return self


def _has_number_of_layers(args: MoeZeroMemoryArgs, world: World) -> bool:
    """Return whether a number of layers is given."""
    return args.num_layers is not None


@condition(
    "num_layers={args.num_layers} is more than a stage has: {world.num_layers} layers / pp={world.pp}",
    fix=(GiveSetting("num_layers", note="smaller than {args.num_layers}"),),
    when=_has_number_of_layers,
)
def stage_has_layers(args: MoeZeroMemoryArgs, world: World) -> bool:
    """Check that a stage has as many layers as level1 takes."""
    return bool((args.num_layers or 0) <= world.num_layers // world.pp)


@condition(
    "every layer is recomputed as a whole (recompute_granularity full), which {feature} does not support",
    fix=(GiveField("recompute_granularity", "selective"), RemoveFeature()),
)
def no_full_recompute(args: MoeZeroMemoryArgs, world: World) -> bool:
    """Check that layers are not recomputed as a whole."""
    return not (world.knows("recompute_granularity") and world.recompute_granularity == "full")


def _recomputed(world: World) -> list[str]:
    """Return the modules of experts that Megatron recomputes."""
    selective = world.recompute_granularity == "selective"
    return sorted(set(_OWN) & set(world.recompute_modules)) if selective else []


def _named_modules(args: MoeZeroMemoryArgs, world: World) -> dict[str, str]:
    """Name these modules for a message."""
    return {"modules": ", ".join(_recomputed(world))}


@condition(
    f"recompute_modules has {{modules}}, and {{feature}} recomputes {', '.join(_OWN)} itself",
    fix=(GiveField("recompute_modules", note="without {modules}"), RemoveFeature()),
    values=_named_modules,
)
def experts_are_recomputed_once(args: MoeZeroMemoryArgs, world: World) -> bool:
    """Check that Megatron recomputes no part of the experts."""
    return not _recomputed(world)


class MoeZeroMemory(Feature[MoeZeroMemoryArgs]):
    """Recompute expert activations from resent tokens.

    The transfers of backward overlap with computation.
    """

    spec = FeatureSpec(
        name="moe-zero-memory",
        category=Category.MOE,
        constraints=(
            Requires("moe-alltoall-overlap", reason="its transfers hide what is computed and sent again"),
            Conflicts("moe-adaptive-recompute", reason="each recomputes the experts in its own way"),
            stage_has_layers,
            no_full_recompute,
            experts_are_recomputed_once,
        ),
        numerics=Numerics.reordered(reason="moe-alltoall-overlap adds in another order; what is computed again has equal bits"),
    )

    @hookimpl
    def layer_spec(self, spec: Any, config: Any) -> Any:
        from mindspeed.features.moe_zero_memory.layers import with_forgetting_experts

        return with_forgetting_experts(spec)

    @hookimpl
    def patches(self) -> list[Patch]:
        if self.args.level == "level0":
            return []
        return [
            Wrap(
                "megatron.core.transformer.moe.moe_layer:BaseMoELayer.set_layer_number",
                "mindspeed.features.moe_zero_memory.layers:numbering_experts",
                reason="the number of a layer decides about its level",
                phase="build",
            )
        ]
