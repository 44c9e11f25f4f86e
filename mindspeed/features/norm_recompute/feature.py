"""Norms whose outputs and saved tensors are recomputed in the backward pass."""

from __future__ import annotations

from typing import Any

from mindspeed.memory.conditions import LOCAL_LAYERS, PARTS_OF_LAYERS, chunks_have_num_layers
from mindspeed.memory.feature import NORMS, PartRecompute
from mindspeed.plugins import (
    Category,
    FeatureSpec,
    GiveField,
    Mixin,
    ModelCondition,
    Numerics,
    Patch,
    RemoveFeature,
    World,
    condition,
    hookimpl,
)

_LAYERS = "mindspeed.features.norm_recompute.layers"


@condition(
    "norms are parts of the linear layers that follow them, and {feature} recomputes norms of their own",
    fix=(GiveField("transformer_engine_layers", False), RemoveFeature()),
)
def norms_are_modules(args: Any, world: World) -> bool:
    """Check that norms are modules of their own, as in Megatron's local layers."""
    return not world.is_set("engine_over_local")


class NormRecompute(PartRecompute):
    """Recompute norms in backward.

    What the two norms of a layer save and return is freed in forward, and recomputed from the norm's input.
    """

    spec = FeatureSpec(
        name="norm-recompute",
        category=Category.MEMORY,
        constraints=(
            *PARTS_OF_LAYERS,
            chunks_have_num_layers,
            norms_are_modules,
            ModelCondition(
                "mindspeed.features.norm_recompute.model_conditions:fused_norms",
                "no norm of a layer is part of a fused linear layer",
                fix=LOCAL_LAYERS,
            ),
        ),
        numerics=Numerics.exact(),
    )
    recomputed_tensors = NORMS

    @hookimpl
    def patches(self) -> list[Patch]:
        return [
            Mixin(
                "megatron.core.tensor_parallel.random:CheckpointWithoutOutput",
                f"{_LAYERS}:RecomputedNorm",
                reason="Megatron's own calls around a norm keep the graph of the first forward pass",
            )
        ]

    def recompute(self, layer: Any) -> None:
        from mindspeed.memory.norms import recompute_norms

        recompute_norms(layer, self.spec.name)
