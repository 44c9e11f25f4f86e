"""Options of Megatron's configuration that the dispatchers of this library cannot serve."""

from __future__ import annotations

from typing import Any

from mindspeed.moe.grouped_experts import GroupedExperts
from mindspeed.plugins import with_parts


def dispatcher_misfits(config: Any, dispatcher: str) -> list[str]:
    """Give the reasons why a dispatcher of this kind cannot serve a configuration; empty if it can."""
    graphs = getattr(config, "cuda_graph_impl", "none") != "none" or getattr(config, "enable_cuda_graph", False)
    wrong = {
        f"moe_token_dispatcher_type is {config.moe_token_dispatcher_type}, not {dispatcher},": (
            config.moe_token_dispatcher_type != dispatcher
        ),
        "overlap_moe_expert_parallel_comm is set": bool(getattr(config, "overlap_moe_expert_parallel_comm", False)),
        "CUDA graphs are set": bool(graphs or getattr(config, "external_cuda_graph", False)),
        "moe_router_padding_for_quantization is set": bool(
            getattr(config, "moe_router_padding_for_quantization", False)
            or getattr(config, "moe_router_padding_for_fp8", False)
        ),
        "fp8 or fp4 is set": bool(getattr(config, "fp8", None) or getattr(config, "fp4", None)),
        "moe_pad_expert_input_to_capacity is set": dispatcher == "allgather" and config.moe_pad_expert_input_to_capacity,
        "moe_latent_size is set": getattr(config, "moe_latent_size", None) is not None,
    }
    return [sentence for sentence, holds in wrong.items() if holds]


def recompute_misfits(config: Any) -> list[str]:
    """Give the recomputation of a configuration that would repeat what the experts themselves recompute."""
    if config.recompute_granularity == "full":
        return ["recompute_granularity is full"]
    modules = {"moe", "moe_act", "shared_experts"} & set(config.recompute_modules or ())
    selective = config.recompute_granularity == "selective"
    return [f"recompute_modules has {', '.join(sorted(modules))}"] if selective and modules else []


def has_other_experts(spec: Any) -> bool:
    """Return whether a spec has experts that are not grouped ones of this library; a stage of dense layers has none at all."""
    others: list[Any] = []

    def look(name: str, part: Any) -> Any:
        module = getattr(part, "module", getattr(part, "func", part))  # of a ModuleSpec or a partial
        if name == "experts" and not (isinstance(module, type) and issubclass(module, GroupedExperts)):
            others.append(part)
        return part

    with_parts(spec, look)
    return bool(others)
