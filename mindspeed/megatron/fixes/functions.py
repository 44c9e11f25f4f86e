"""Patches that Megatron needs beside a device, as data: one row per function, with the versions that need it."""

from __future__ import annotations

from typing import Final

_OPTIMIZER: Final = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"

UNCOMPILED: Final[tuple[tuple[str, str | None, str], ...]] = (
    # (module under megatron.core, Megatron versions or None for all, functions that it gives to torch.compile at import)
    ("activations", None, "squared_relu quick_gelu fast_gelu"),
    ("transformer.utils", None, "gelu_impl erf_gelu"),
    ("transformer.torch_norm", None, "L2Norm._norm"),
    ("transformer.attention", ">=0.16", "Attention._apply_output_gate"),
    ("transformer.moe.router", ">=0.16", "TopKRouter._apply_expert_bias"),
    ("transformer.moe.token_dispatcher", ">=0.16", "MoEFlexTokenDispatcher.dispatch_preprocess"),
    ("fusions.fused_bias_gelu", None, "bias_gelu bias_gelu_back"),
    (
        "fusions.fused_bias_swiglu",
        None,
        "swiglu bias_swiglu weighted_swiglu swiglu_back bias_swiglu_back weighted_swiglu_back",
    ),
    ("fusions.fused_bias_geglu", None, "geglu bias_geglu geglu_back bias_geglu_back"),
    (
        "fusions.fused_bias_geglu",
        ">=0.15",
        "quick_gelu quick_geglu weighted_quick_geglu quick_geglu_back weighted_quick_geglu_back weighted_bias_quick_geglu "
        "weighted_bias_quick_geglu_back",
    ),
    (
        "fusions.fused_cross_entropy",
        None,
        "calculate_logits_max calculate_predicted_logits calculate_cross_entropy_loss calculate_gradients",
    ),
    ("fusions.fused_pad_routing_map", ">=0.16", "fused_pad_routing_map"),
    ("fusions.fused_weighted_squared_relu", None, "weighted_squared_relu _squared_relu_back weighted_squared_relu_back"),
    ("fusions.fused_bias_dropout", None, "bias_dropout_add_fused_train bias_dropout_add_fused_inference"),
)

FIXES: Final[tuple[tuple[str, str | None, str, str], ...]] = (
    # (target, Megatron versions or None for all, wrapper under mindspeed.megatron.fixes, why)
    (
        "importlib.machinery:PathFinder.find_spec",
        ">=0.16",
        "kernels:import_without_triton",
        "batch_invariant_kernels imports triton without asking whether it is there, and Megatron-LM imports that at start",
    ),
    (
        "megatron.legacy.fused_kernels:load",
        "<0.17",
        "kernels:build_nothing",
        "Megatron-LM asks a CUDA compiler for its version at start, though it has no fused kernel left to build",
    ),
    (
        "megatron.core.utils:is_te_min_version",
        "<0.17",
        "layers:false_without_engine",
        "without Transformer Engine its version is None, which cannot be compared",
    ),
    (
        "megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__",
        None,
        "layers:allow_sequence_parallel",
        "torch norms work under sequence parallelism once their parameters are marked for the gradient sum",
    ),
    (
        "megatron.core.transformer.dot_product_attention:DotProductAttention.__init__",
        None,
        "layers:take_widths",
        "multi-latent attention gives its widths, which only Transformer Engine's core attention takes",
    ),
    (
        "megatron.core.transformer.moe.moe_utils:router_gating_linear",
        None,
        "moe:gate_without_engine",
        "te_general_gemm is not defined without Transformer Engine",
    ),
    (
        f"{_OPTIMIZER}.state_dict",
        None,
        "optimizer:step_zero",
        "torch's Adam has no step before the first one, and one is asserted",
    ),
    (
        f"{_OPTIMIZER}.sharded_state_dict",
        ">=0.15",
        "optimizer:reshardable",
        "the deprecated default format cannot hold the step of torch's Adam",
    ),
    (
        f"{_OPTIMIZER}._get_main_param_and_optimizer_states",
        "<0.15",
        "optimizer:leave_step",
        "a checkpoint's slices of a parameter cannot hold the step of torch's Adam, and there is no other format yet",
    ),
    (
        f"{_OPTIMIZER}.load_state_dict",
        None,
        "optimizer:own_steps",
        "all parameters get one step tensor, which torch's Adam adds to for each",
    ),
    (
        f"{_OPTIMIZER}._set_main_param_and_optimizer_states",
        None,
        "optimizer:keep_step",
        "the step of torch's Adam is not among the states that are loaded for a parameter",
    ),
)

CHECKPOINTS: Final = "megatron.core.dist_checkpointing"
PRODUCT: Final[tuple[tuple[str, str], ...]] = (
    # (target under megatron.core.dist_checkpointing, wrapper under mindspeed.megatron.fixes.numpy2)
    ("mapping:ShardedTensor.local_coordinates", "local_coordinates"),
    ("exchange_utils:_shard_size", "shard_size"),
    ("validation:_validate_sharding_for_key_flattened", "check_coverage"),
)
