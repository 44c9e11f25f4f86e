"""Options of Megatron's configuration with which layers cannot run in chunks."""

from __future__ import annotations

from typing import Any


def misfits(config: Any) -> dict[str, str]:
    """Give every option of a configuration with which layers cannot run in chunks, with its fix; empty if there is none."""
    graphs = getattr(config, "cuda_graph_impl", "none") != "none" or getattr(config, "enable_cuda_graph", False)
    wrong = {
        "expert_model_parallel_size is 1, and there is no transfer to hide": (
            config.expert_model_parallel_size == 1,
            "set expert_model_parallel_size=2 or more",
        ),
        "context_parallel_size is above 1, and a rank has not all keys": (
            config.context_parallel_size > 1,
            "set context_parallel_size=1",
        ),
        "recompute_granularity is selective, and the modules of a layer run once per chunk": (
            config.recompute_granularity == "selective",
            "set recompute_granularity=full",
        ),
        "window_size is set, and chunks are of causal or full attention": (
            getattr(config, "window_size", None) is not None,
            "drop window_size",
        ),
        f"moe_router_load_balancing_type is {config.moe_router_load_balancing_type}, and routes all tokens together": (
            config.moe_router_load_balancing_type == "sinkhorn",
            "set moe_router_load_balancing_type=aux_loss",
        ),
        "moe_expert_capacity_factor is set, and its places are of all tokens together": (
            config.moe_expert_capacity_factor is not None,
            "drop moe_expert_capacity_factor",
        ),
        "multi_latent_attention is set": (getattr(config, "multi_latent_attention", False), "drop multi_latent_attention"),
        "CUDA graphs are set": (
            bool(graphs or getattr(config, "external_cuda_graph", False)),
            "drop the CUDA graphs of the configuration",
        ),
        **{f"{name} is set": (bool(getattr(config, name, None)), f"drop {name}") for name in _UNSUPPORTED},
    }
    return {text: fix for text, (holds, fix) in wrong.items() if holds}


_UNSUPPORTED = (
    "attention_output_gate",
    "fine_grained_activation_offloading",
    "cpu_offloading",
    "overlap_moe_expert_parallel_comm",
    "moe_router_force_load_balancing",
    "moe_latent_size",
    "fp8",
    "fp4",
)
