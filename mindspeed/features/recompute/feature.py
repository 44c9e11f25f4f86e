"""Activations recomputed in the backward pass instead of kept."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, get_args

from mindspeed.features.recompute.estimates import estimate, saved, variants
from mindspeed.features.recompute.rules import CONSTRAINTS, Module, RecomputeArgs, is_full
from mindspeed.plugins import (
    ArgOverride,
    Category,
    Estimate,
    Feature,
    FeatureSpec,
    MegatronFlag,
    Mixin,
    Numerics,
    Patch,
    SavedTensors,
    Slot,
    Wrap,
    hookimpl,
)

_LAYERS = "mindspeed.features.recompute.layers"
_RANDOM = "megatron.core.tensor_parallel.random"


class Recompute(Feature[RecomputeArgs]):
    """Recompute activations of layers or modules.

    Only the inputs of these modules or layers are kept. Their forward pass runs again when backward needs the rest.
    """

    spec = FeatureSpec(
        name="recompute",
        category=Category.MEGATRON,
        level=0,
        slots={Slot.RECOMPUTE_POLICY},
        constraints=CONSTRAINTS,
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
    def held_slots(self) -> Collection[str]:
        return self.spec.slots if is_full(self.args, self.world) else ()

    @hookimpl
    def saved_tensors(self, tensors: SavedTensors) -> SavedTensors:
        return saved(self.args, self.world, tensors)

    @hookimpl
    def estimate(self) -> Estimate:
        return estimate(self.args, self.world)

    @hookimpl
    def variants(self) -> Sequence[Mapping[str, Any]]:
        return variants(self.world)

    @hookimpl
    def megatron_args(self) -> list[ArgOverride]:
        overrides = [
            ArgOverride(f"recompute_{name}", value, f"recompute.{name} controls what backward recomputes")
            for name in ("granularity", "modules", "method", "num_layers")
            if (value := getattr(self.args, name)) is not None
        ]
        if self.args.distribute:
            overrides.append(
                ArgOverride(
                    "distribute_saved_activations",
                    True,
                    "recompute.distribute=true splits saved inputs over tensor-parallel ranks",
                )
            )
        return overrides

    @hookimpl
    def patches(self) -> list[Patch]:
        modules = set(self.args.modules or ())
        patches: list[Patch] = []
        if "mlp" in modules:
            reason = "keeps a bias that is returned separately from the output out of the autograd graph"
            patches.append(Wrap(f"{_RANDOM}:checkpoint", f"{_LAYERS}:checkpoint", reason))
        if modules & {"layernorm", "moe_act", "mla_up_proj"}:
            reason = "avoids a request for Transformer Engine where it is not installed, and lets a norm be recomputed"
            patches.append(Mixin(f"{_RANDOM}:CheckpointWithoutOutput", f"{_LAYERS}:LocalCheckpoint", reason))
        return patches
