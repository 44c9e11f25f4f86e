"""The layers of a model whose parts a feature recomputes, and the configurations in which none can be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspeed.memory.randomness import RandomState
from mindspeed.memory.region import Region
from mindspeed.plugins.fixes import Advice
from mindspeed.plugins.problems import MindSpeedError, Problem


def refusals(config: Any) -> list[str]:
    """List the options of a configuration under which no part of a layer can be recomputed by itself."""
    graphs = getattr(config, "cuda_graph_impl", "none") not in (None, "none")  # since Megatron 0.15
    wrong = {
        "uniform full recomputation takes every layer": config.recompute_granularity == "full"
        and config.recompute_method == "uniform",
        "CUDA graphs keep every storage": graphs
        or getattr(config, "enable_cuda_graph", False)
        or getattr(config, "external_cuda_graph", False),
        "fp8 layers keep other tensors": bool(config.fp8),
        "fp4 layers keep other tensors": bool(getattr(config, "fp4", None)),  # since Megatron 0.15
        "overlap_moe_expert_parallel_comm runs layers in parts": getattr(config, "overlap_moe_expert_parallel_comm", False),
    }
    return [sentence for sentence, holds in wrong.items() if holds]


def chosen_layers(chunks: Sequence[Any], count: int | None, feature: str) -> list[Any]:
    """The first ``count`` layers, or all, of each model chunk behind those that block recompute takes.

    Raises MindSpeedError with MS304 where a chunk has fewer, none is left, or the weights are sharded.
    """
    from megatron.core.transformer.transformer_block import TransformerBlock

    modules = [module for chunk in chunks for module in chunk.modules()]
    if any(type(module).__name__.endswith("FullyShardedDataParallel") for module in modules):
        raise _refused(feature, "sharded weights are not there when a layer is repeated", "train without FSDP")
    chosen: list[Any] = []
    for block in modules:
        if not isinstance(block, TransformerBlock) or not len(block.layers):
            continue
        layers = list(block.layers)
        taken = min(_fully_recomputed(block.config), len(layers))
        left = len(layers) - taken
        fix = "use fewer layers of block recomputation" if taken else f"--set {feature}.num_layers={left}"
        if not left or (count or 0) > left:
            asked = "every layer" if count is None else f"num_layers={count}"
            text = f"{asked} is asked for, and a model chunk has {len(layers)} layers, {taken} of them in block recomputation"
            raise _refused(feature, text, fix)
        chosen += layers[taken:] if count is None else layers[taken : taken + count]
    return chosen


def model_region(owner: str, module: str) -> Region:
    """Return a region whose function may draw from Megatron's random number tracker."""
    return Region(owner, [tracker_state()], module)


def tracker_state() -> RandomState:
    """Return the state of Megatron's random number tracker."""
    return RandomState(_tracker_states, _set_tracker_states)


def _tracker_states() -> Any:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    return get_cuda_rng_tracker().get_states()


def _set_tracker_states(states: Any) -> None:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    get_cuda_rng_tracker().set_states(states)


def _fully_recomputed(config: Any) -> int:
    is_block = config.recompute_granularity == "full" and config.recompute_method == "block"
    return int(config.recompute_num_layers or 0) if is_block else 0


def _refused(feature: str, text: str, fix: str) -> MindSpeedError:
    return MindSpeedError([Problem("MS304", f"{feature}: {text}", (feature,), fix=Advice(f"{fix}, or remove {feature}"))])
