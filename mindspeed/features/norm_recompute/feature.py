"""Norms whose outputs and saved tensors are recomputed in the backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspeed import plugins as ms
from mindspeed.memory.conditions import LOCAL_LAYERS, PARTS_OF_LAYERS, chunks_have_num_layers
from mindspeed.memory.feature import NORMS, LayersArgs, PartRecompute

_LAYERS = "mindspeed.features.norm_recompute.layers"


class NormRecompute(PartRecompute[LayersArgs]):
    """Recompute norms in backward.

    Outputs and saved tensors of the two norms of a layer are freed in forward and recomputed from the norm's input.
    """

    spec = ms.FeatureSpec(
        name="norm-recompute",
        category=ms.Category.MEMORY,
        constraints=(
            *PARTS_OF_LAYERS,
            chunks_have_num_layers,
            ms.Condition.unset(
                "engine_over_local",
                "norms are fused into the linear layers that follow them, but {feature} recomputes separate norms",
                fix=(ms.Fix.give_field("transformer_engine_layers", False), ms.Fix.remove_feature()),
            ),
            ms.ModelCondition(
                "mindspeed.features.norm_recompute.layers:fused_norms",
                "no norm of a layer is fused into a linear layer",
                fix=LOCAL_LAYERS,
            ),
        ),
        numerics=ms.Numerics.exact(),
        own_trainer="from mindspeed.parallel import Region",
    )

    @ms.hookimpl
    def patches(self) -> list[ms.Patch]:
        return [
            ms.Mixin(
                "megatron.core.tensor_parallel.random:CheckpointWithoutOutput",
                f"{_LAYERS}:RecomputedNorm",
                reason="reuses the autograd graph of the forward pass when a norm is recomputed, so gradients are bitwise "
                "equal to those without recomputation. Megatron's class builds a second graph in backward, which may sum "
                "gradients in a different order",
            )
        ]

    def recomputed_tensors(self) -> Sequence[str]:
        return NORMS

    def recompute(self, layer: Any) -> None:
        from mindspeed.memory.region_checkpoint import recompute_norms

        recompute_norms(layer, self.spec.name)
