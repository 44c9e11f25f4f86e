"""Conditions of memory features that need a built model or optimizer. Imported when it exists."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mindspeed.memory.model_layers import blocks_of, fully_recomputed, has_part
from mindspeed.plugins.feature import Feature


def missing_layers(feature: Feature[Any], chunks: Sequence[Any]) -> Iterator[str]:
    """Yield a sentence for sharded weights, and for model chunks that lack layers."""
    modules = [module for chunk in chunks for module in chunk.modules()]
    if any(type(module).__name__.endswith("FullyShardedDataParallel") for module in modules):
        yield f"weights are fully sharded (FSDP) and not gathered when {feature.spec.name} needs them"
    wanted, part = getattr(feature.args, "num_layers", None) or 1, getattr(feature.args, "part", "")
    for block in blocks_of(chunks):
        counted = [has_part(layer, part) for layer in block.layers]
        count, taken = sum(counted), sum(counted[: fully_recomputed(block.config)])
        if count and wanted > count - taken:
            yield (f"{wanted} layers are needed, but a model chunk has {count}, and {taken} of them are in block recomputation")


def unsuited_optimizers(feature: Feature[Any], optimizer: Any) -> Iterator[str]:
    """Yield a sentence for an optimizer, chained or not, that works on whole matrices or on sharded weights."""
    members = [optimizer, *getattr(optimizer, "chained_optimizers", ())]
    if any(type(member).__name__ == "LayerWiseDistributedOptimizer" for member in members):
        yield "the optimizer is split by layers and does not update each element independently"
    if any(getattr(getattr(member, "ddp_config", None), "use_megatron_fsdp", False) for member in members):
        yield "Megatron FSDP manages main weights itself"
