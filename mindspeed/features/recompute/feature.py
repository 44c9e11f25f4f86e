"""Activations recomputed in the backward pass instead of kept."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, get_args

from mindspeed import plugins as ms
from mindspeed.features.recompute.estimates import estimate, saved, variants
from mindspeed.features.recompute.rules import CONSTRAINTS, Module, RecomputeArgs, is_full

_LAYERS = "mindspeed.features.recompute.layers"
_RANDOM = "megatron.core.tensor_parallel.random"


class Recompute(ms.Feature[RecomputeArgs]):
    """Recompute activations of layers or modules.

    Only the inputs of these modules or layers are kept. Their forward pass runs again when backward needs the rest.
    """

    spec = ms.FeatureSpec(
        name="recompute",
        category=ms.Category.MEGATRON,
        level=0,
        slots={ms.Slot.RECOMPUTE_POLICY},
        constraints=CONSTRAINTS,
        megatron_flags=(
            ms.MegatronFlag("recompute_granularity", "granularity", switch="on"),
            ms.MegatronFlag("recompute_activations", switch="on"),
            *(ms.MegatronFlag(f"recompute_{setting}", setting) for setting in ("method", "num_layers")),
            ms.MegatronFlag("recompute_modules", "modules", takes=get_args(Module)),
            ms.MegatronFlag("distribute_saved_activations", "distribute"),
        ),
        numerics=ms.Numerics.exact(),
    )

    @ms.hookimpl
    def held_slots(self) -> Collection[str]:
        return self.spec.slots if is_full(self.args, self.world) else ()

    @ms.hookimpl
    def saved_tensors(self, tensors: ms.SavedTensors) -> ms.SavedTensors:
        return saved(self.args, self.world, tensors)

    @ms.hookimpl
    def estimate(self) -> ms.Estimate:
        return estimate(self.args, self.world)

    @ms.hookimpl
    def variants(self) -> Sequence[Mapping[str, Any]]:
        return variants(self.world)

    @ms.hookimpl
    def megatron_args(self) -> list[ms.ArgOverride]:
        overrides = [
            ms.ArgOverride(f"recompute_{name}", value, f"recompute.{name} controls what backward recomputes")
            for name in ("granularity", "modules", "method", "num_layers")
            if (value := getattr(self.args, name)) is not None
        ]
        if self.args.distribute:
            overrides.append(
                ms.ArgOverride(
                    "distribute_saved_activations",
                    True,
                    "recompute.distribute=true splits saved inputs over tensor-parallel ranks",
                )
            )
        return overrides

    @ms.hookimpl
    def patches(self) -> list[ms.Patch]:
        modules = set(self.args.modules or ())
        patches: list[ms.Patch] = []
        if "mlp" in modules:
            reason = "keeps a bias that is returned separately from the output out of the autograd graph"
            patches.append(ms.Wrap(f"{_RANDOM}:checkpoint", f"{_LAYERS}:checkpoint", reason))
        if modules & {"layernorm", "moe_act", "mla_up_proj"}:
            reason = "avoids a request for Transformer Engine where it is not installed, and lets a norm be recomputed"
            patches.append(ms.Mixin(f"{_RANDOM}:CheckpointWithoutOutput", f"{_LAYERS}:LocalCheckpoint", reason))
        return patches
