"""Arguments as frameworks on top of MindSpeed give them to ``repatch``: whole dictionaries, defaults of their own included."""

from __future__ import annotations

from typing import Any, Final

ENGINE: Final[dict[str, Any]] = {"use_flash_attn": True}
"""What an engine for reinforcement learning gives: attention, and the context-parallel size where it is not 1."""

TRAINER: Final[dict[str, Any]] = {
    "micro_batch_size": 1,
    "global_batch_size": 8,
    "recompute_granularity": "selective",
    "recompute_method": None,
    "recompute_num_layers": None,
    "recompute_modules": ["core_attn"],
    "train_iters": None,
    "num_train_epochs": 1,
    "masked_softmax_fusion": True,
    "bias_dropout_fusion": True,
    "bias_activation_fusion": True,
    "apply_rope_fusion": False,
    "gradient_accumulation_fusion": True,
    "cross_entropy_loss_fusion": True,
    "calculate_per_token_loss": True,
    "attention_backend": "flash",
    "optimizer": "adam",
    "optimizer_cpu_offload": False,
    "use_precision_aware_optimizer": False,
    "dataloader_num_workers": 4,
    "data_sharding": False,
    "padding_free": True,
    "lr": 1e-5,
    "clip_grad": 1.0,
    "mcore_model": None,
    "no_save_optim": False,
    "finetune": True,
    "ddp_backend": "nccl",
    "use_distributed_optimizer": True,
    "use_megatron_fsdp": False,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "overlap_p2p_comm": True,
    "sequence_parallel": False,
    "context_parallel_size": 1,
    "cp_comm_type": None,
    "cp_partition_mode": "zigzag",
    "tp_comm_overlap": False,
    "overlap_grad_reduce": False,
    "overlap_param_gather": False,
    "virtual_pipeline_model_parallel_size": None,
    "pipeline_model_parallel_layout": None,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": 1,
    "fp8_format": None,
    "fp16": False,
    "bf16": False,
    "attention_softmax_in_fp32": True,
    "moe_router_load_balancing_type": None,
    "moe_router_dtype": "fp32",
    "moe_token_dispatcher_type": "alltoall",
    "moe_grouped_gemm": True,
    "moe_permute_fusion": False,
    "moe_aux_loss_coeff": 0.0,
    "moe_shared_expert_overlap": False,
    "mtp_num_layers": None,
    "model": "some-model",
    "model_type": "qwen3",
    "adapters": [],
    "merge_lora": None,
    "callbacks": [],
    "use_flash_attn": True,
}
"""What a trainer gives: every field of its own dataclass, of which the model's shape is not one."""

UNREAD: Final = 12
"""Fields of `TRAINER` that neither a feature nor Megatron reads."""
