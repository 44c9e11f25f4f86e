"""The layers of a built model whose parts a feature recomputes or offloads, and conditions on them and on the optimizer."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from mindspeed.memory.recomputation import RandomState
from mindspeed.memory.region import Region
from mindspeed.plugins.feature import Feature


def chosen_layers(chunks: Sequence[Any], count: int | None, part: str = "") -> list[Any]:
    """Return the first ``count`` layers, or all, of each model chunk behind those that block recomputation takes.

    Of a hybrid model, whose layers have one part each, those with ``part`` count: ``self_attention`` or ``mlp``.
    """
    chosen: list[Any] = []
    for block in blocks_of(chunks):
        layers = list(block.layers)[fully_recomputed(block) :]
        chosen += [layer for layer in layers if has_part(layer, part)][:count]
    return chosen


def has_part(layer: Any, part: str) -> bool:
    """Return whether a layer has a part; every layer has the part without a name."""
    from megatron.core.transformer.identity_op import IdentityOp

    return not part or not isinstance(getattr(layer, part, None), IdentityOp | None)


def blocks_of(chunks: Sequence[Any]) -> list[Any]:
    """Return every transformer block with layers, and every stack of a hybrid model but those of multi-token prediction."""
    from megatron.core.transformer.transformer_block import TransformerBlock

    hybrid = sys.modules.get("megatron.core.models.hybrid.hybrid_block")
    kinds = (TransformerBlock, hybrid.HybridStack) if hybrid is not None else TransformerBlock
    modules = [module for chunk in chunks for module in chunk.modules()]
    blocks = [module for module in modules if isinstance(module, kinds) and len(module.layers)]
    return [block for block in blocks if not getattr(block, "is_mtp_layer", False)]


def fully_recomputed(block: Any) -> int:
    """Return how many of the first layers of a block full recomputation takes."""
    config = block.config
    if config.recompute_granularity != "full":
        return 0
    return int(config.recompute_num_layers or 0) if config.recompute_method == "block" else len(block.layers)


def model_region(owner: str, module: str) -> Region:
    """Return a region whose function may draw from Megatron's random number tracker."""
    return Region(owner, [tracker_state()], module)


def tracker_state() -> RandomState:
    """Return the state of Megatron's random number tracker."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker as tracker

    return RandomState(lambda: tracker().get_states(), lambda states: tracker().set_states(states))


def missing_layers(feature: Feature[Any], chunks: Sequence[Any]) -> Iterator[str]:
    """Yield a sentence for sharded weights, and for model chunks that lack layers."""
    modules = [module for chunk in chunks for module in chunk.modules()]
    if any(type(module).__name__.endswith("FullyShardedDataParallel") for module in modules):
        yield f"weights are fully sharded (FSDP) and not gathered when {feature.spec.name} needs them"
    wanted, part = getattr(feature.args, "num_layers", None) or 0, getattr(feature.args, "part", "")
    for block in blocks_of(chunks):
        counted = [has_part(layer, part) for layer in block.layers]
        count, taken = sum(counted), sum(counted[: fully_recomputed(block)])
        if 0 < count - taken < wanted:
            yield (f"{wanted} layers are needed, but a model chunk has {count}, and {taken} of them are in block recomputation")


def unsuited_optimizers(feature: Feature[Any], optimizer: Any) -> Iterator[str]:
    """Yield a sentence for an optimizer, chained or not, that works on whole matrices or on sharded weights."""
    members = [optimizer, *getattr(optimizer, "chained_optimizers", ())]
    if any(type(member).__name__ == "LayerWiseDistributedOptimizer" for member in members):
        yield "the optimizer is split by layers and does not update each element independently"
    if any(getattr(getattr(member, "ddp_config", None), "use_megatron_fsdp", False) for member in members):
        yield "Megatron FSDP manages main weights itself"
