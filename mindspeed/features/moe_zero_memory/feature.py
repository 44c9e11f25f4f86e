"""Activations of experts computed again in backward, under the transfers."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import model_validator

from mindspeed import plugins as ms
from mindspeed.features.moe_zero_memory.counting import layers_of_stage

_OWN = ("moe", "moe_act", "shared_experts")
"""Modules of Megatron's selective recompute whose activations the feature computes again itself."""


class MoeZeroMemoryArgs(ms.FeatureArgs):
    level: Literal["level0", "level1"] = ms.Field(
        "level0",
        description="Expert activations that are kept for backward: level0 = the output of the first linear layer; level1 = "
        "none, which saves more memory and recomputes more",
    )
    num_layers: int | None = ms.Field(
        None,
        ge=0,
        description="With level=level1: number of layers per pipeline stage that keep no expert activations (default: all "
        "layers). The other layers keep the output of the first linear layer of the experts, as with level0. The first layer "
        "of every model chunk of a stage is counted before the second ones. In a HybridModel, only layers with experts are "
        "counted",
    )

    @model_validator(mode="after")
    def _limits_level1(self) -> MoeZeroMemoryArgs:
        if self.num_layers is not None and self.level != "level1":
            text = f"num_layers={self.num_layers} limits level1, but level is {self.level}"
            raise ms.SettingsError(text, ms.Fix.drop_setting("num_layers"), ms.Fix.give_setting("level", "level1"))
        return self


def _has_number_of_layers(args: MoeZeroMemoryArgs, world: ms.World) -> bool:
    """Return whether num_layers is set."""
    return args.num_layers is not None


@ms.condition(
    "num_layers={args.num_layers} is greater than the {layers} of a stage",
    fix=(ms.Fix.give_setting("num_layers", "{most}"), ms.Fix.drop_setting("num_layers")),
    when=_has_number_of_layers,
    values=layers_of_stage,
)
def stage_has_layers(args: MoeZeroMemoryArgs, world: ms.World) -> bool:
    """Check that a stage has as many layers as level1 takes."""
    return bool((args.num_layers or 0) <= layers_of_stage(args, world)["most"])


@ms.condition(
    "every layer is recomputed as a whole (recompute_granularity full), which {feature} does not support",
    fix=(ms.Fix.give_field("recompute_granularity", "selective"), ms.Fix.remove_feature()),
)
def no_full_recompute(args: MoeZeroMemoryArgs, world: ms.World) -> bool:
    """Check that layers are not recomputed as a whole."""
    return not (world.knows("recompute_granularity") and world.recompute_granularity == "full")


def _recomputed(world: ms.World) -> list[str]:
    """Return the modules of experts that Megatron recomputes."""
    selective = world.recompute_granularity == "selective"
    return sorted(set(_OWN) & set(world.recompute_modules)) if selective else []


def _named_modules(args: MoeZeroMemoryArgs, world: ms.World) -> dict[str, str]:
    """Name these modules for a message."""
    return {"modules": ", ".join(_recomputed(world))}


@ms.condition(
    f"recompute_modules has {{modules}}, and {{feature}} recomputes {', '.join(_OWN)} itself",
    fix=(ms.Fix.give_field("recompute_modules", note="N = your list of modules, without {modules}"), ms.Fix.remove_feature()),
    values=_named_modules,
)
def experts_are_recomputed_once(args: MoeZeroMemoryArgs, world: ms.World) -> bool:
    """Check that Megatron recomputes no part of the experts."""
    return not _recomputed(world)


class MoeZeroMemory(ms.Feature[MoeZeroMemoryArgs]):
    """Recompute expert activations from resent tokens.

    Ranks do not keep the tokens that their experts received. In backward the tokens are sent again, overlapped with
    computation.
    """

    spec = ms.FeatureSpec(
        name="moe-zero-memory",
        category=ms.Category.MOE,
        constraints=(
            ms.Requires(
                "moe-alltoall-overlap",
                reason="moe-zero-memory sends tokens again in backward, by the asynchronous all-to-alls of "
                "moe-alltoall-overlap",
            ),
            ms.Conflicts("moe-adaptive-recompute", reason="moe-zero-memory already recomputes the experts"),
            stage_has_layers,
            no_full_recompute,
            experts_are_recomputed_once,
        ),
        numerics=ms.Numerics.reordered(
            reason="moe-alltoall-overlap, which this feature requires, sums gradients in a different order than Megatron. "
            "Recomputation itself is bitwise exact"
        ),
        own_trainer='from mindspeed.nn import MoE  # zero_memory="level0"',
    )

    @ms.hookimpl
    def layer_spec(self, spec: Any, config: Any) -> Any:
        from mindspeed.features.moe_zero_memory.layers import with_forgetting_experts

        return with_forgetting_experts(spec)

    @ms.hookimpl
    def patches(self) -> list[ms.Patch]:
        if self.args.level == "level0":
            return []
        return [
            ms.Wrap(
                "megatron.core.transformer.moe.moe_layer:BaseMoELayer.set_layer_number",
                "mindspeed.features.moe_zero_memory.layers:numbering_experts",
                reason="the layer number decides which recomputation level a layer uses",
                phase="build",
            )
        ]
