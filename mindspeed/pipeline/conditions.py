"""Conditions that features of pipelines share. Light."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from mindspeed import plugins as ms
from mindspeed.plugins.shared_conditions import NO_OTHER_PASSES, NO_TRANSFORMER_ENGINE_LAYERS

_REMOVE: Final = ms.Fix.remove_feature()


has_stages = ms.Condition.at_least("pp", 2, "at least two pipeline stages are needed, but pp is {world.pp}")


def shares(args: Any, world: ms.World) -> Mapping[str, int]:
    """Return the layers that stages share equally, and the number of these stages."""
    layers, stages = world.equal_share
    return {"layers": layers, "stages": stages}


KEEPS_FORWARDS: Final = (
    has_stages,
    *NO_OTHER_PASSES,
    ms.Condition.unset(
        "partial_checkpoints",
        "Megatron recomputes only some micro-batches (num_microbatches_with_partial_activation_checkpoints), which "
        "{feature} does not support",
    ),
)
"""Conditions of every feature that decides the order of forward passes or of recomputation."""

KEEPS_PASSES: Final = (
    *KEEPS_FORWARDS,
    NO_TRANSFORMER_ENGINE_LAYERS,
    ms.Condition.unset(
        "ring_exchange", "stages send and receive at the same time (ring exchange), but {feature} orders messages one by one"
    ),
    ms.Condition.unset(
        "delayed_weight_gradients",
        "Megatron already delays weight gradients (delay_wgrad_compute), which {feature} does itself",
    ),
    ms.Condition.unset(
        "deferred_embedding_gradients",
        "Megatron already defers the weight gradient of the output layer (defer_embedding_wgrad_compute), which {feature} "
        "does itself",
    ),
    ms.ModelCondition(
        "mindspeed.pipeline.model_conditions:foreign_modules",
        "the model has no Transformer Engine linear layers and no fully sharded parameters",
    ),
)
"""Conditions of every feature whose schedule has separate operations for weight gradients."""

NO_SHARDED_MODEL: Final = ms.ModelCondition(
    "mindspeed.pipeline.model_conditions:sharded_modules",
    "the model has no fully sharded parameters, which a repeated forward pass would have to gather",
)


@ms.condition(
    "the pattern of a hybrid model already assigns layers to pipeline stages",
    fix=(ms.Fix.advise("separate uneven stages with | in the pattern"), ms.Fix.remove_feature()),
)
def layers_have_no_pattern(args: Any, world: ms.World) -> bool:
    """Check that the model is no HybridModel, which has no layout but its pattern."""
    return not world.is_hybrid
