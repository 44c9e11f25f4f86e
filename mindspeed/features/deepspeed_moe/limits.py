"""Options of Megatron's configuration that the gate does not have."""

from __future__ import annotations

from typing import Any


def misfits(config: Any, rsample: bool, random_priority: bool) -> dict[str, str]:
    """Give every option of a configuration that the gate does not have, with its fix; empty if there is none."""
    kind = config.moe_router_load_balancing_type
    graphs = getattr(config, "cuda_graph_impl", "none") != "none" or getattr(config, "enable_cuda_graph", False)
    tp, ep = getattr(config, "tensor_model_parallel_size", 1), getattr(config, "expert_model_parallel_size", 1)
    copies = tp > 1 and ep == 1 and getattr(config, "expert_tensor_parallel_size", tp) == 1
    wrong = {
        f"moe_router_topk is {config.moe_router_topk}, more than the {config.num_moe_experts} experts": (
            config.moe_router_topk > config.num_moe_experts,
            f"use a moe_router_topk of at most {config.num_moe_experts}",
        ),
        f"moe_router_score_function is {config.moe_router_score_function}, and the gate's is softmax": (
            config.moe_router_score_function != "softmax",
            "set moe_router_score_function=softmax",
        ),
        f"moe_router_load_balancing_type is {kind}, and the gate has aux_loss and none": (
            kind not in ("aux_loss", "none"),
            "set moe_router_load_balancing_type=aux_loss",
        ),
        "moe_expert_capacity_factor is set, Megatron's own capacity": (
            config.moe_expert_capacity_factor is not None,
            "drop moe_expert_capacity_factor, and --set deepspeed-moe.capacity_factor",
        ),
        f"expert_tensor_parallel_size is 1, and each of {tp} tensor-parallel ranks would train a copy of every expert alone": (
            copies,
            f"set expert_tensor_parallel_size={tp}, or expert_model_parallel_size={tp}",
        ),
        "moe_token_dispatcher_type is flex": (
            config.moe_token_dispatcher_type == "flex",
            "set moe_token_dispatcher_type=alltoall",
        ),
        **{f"{name} is set": (bool(value), f"drop {name}") for name, value in _unsupported(config).items()},
        **{
            f"{setting} is for one expert per token, and moe_router_topk is {config.moe_router_topk}": (
                given and config.moe_router_topk > 1,
                f"drop deepspeed-moe.{setting.partition('=')[0]}, or set moe_router_topk=1",
            )
            for setting, given in {"noise=rsample": rsample, "random_priority": random_priority}.items()
        },
        "CUDA graphs are set": (
            bool(graphs or getattr(config, "external_cuda_graph", False)),
            "drop the CUDA graphs of the configuration",
        ),
    }
    return {text: fix for text, (holds, fix) in wrong.items() if holds}


def _unsupported(config: Any) -> dict[str, Any]:
    names = (
        "moe_router_num_groups",
        "moe_router_enable_expert_bias",
        "moe_router_topk_scaling_factor",
        "moe_router_force_load_balancing",
        "moe_apply_probs_on_input",
        "moe_shared_expert_overlap",
        "moe_latent_size",
        "overlap_moe_expert_parallel_comm",
        "fp8",
        "fp4",
    )
    return {name: getattr(config, name, None) for name in names}
