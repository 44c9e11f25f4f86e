"""The model and its optimizer in plain Megatron: shape from the plan's world, every size of a layout through the bridge."""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from mindspeed.job.world import World
from mindspeed.training.config import TrainConfig

DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
INITIAL_LOSS_SCALE: Final = 2.0**16
"""First loss scale of fp16; Megatron's own, 2**32, costs a small run its first sixteen steps."""
_SHAPE: Final = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
    *("normalization", "gated_linear_unit"),
)
"""Values of the world that Megatron's configuration has under the same names."""
_OPTIMIZER: Final = {"lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad"}


def transformer_config(world: World, config: TrainConfig) -> TransformerConfig:
    """The model's shape as Megatron's configuration."""
    dtype = DTYPES[world.dtype]
    experts: dict[str, Any] = {}
    if world.num_experts:
        experts = {
            "num_moe_experts": world.num_experts,
            "moe_ffn_hidden_size": world.moe_ffn_hidden_size,
            "moe_router_topk": world.router_topk,
            "moe_shared_expert_intermediate_size": world.shared_expert_hidden_size or None,
            "moe_expert_capacity_factor": world.expert_capacity_factor or None,
            "moe_pad_expert_input_to_capacity": world.padded_experts,
            "moe_router_load_balancing_type": "aux_loss",
            "moe_aux_loss_coeff": config.aux_loss_coeff,
        }
    return TransformerConfig(
        **{name: getattr(world, name) for name in _SHAPE},
        layernorm_epsilon=config.norm_epsilon,
        activation_func=getattr(F, world.activation),
        add_bias_linear=world.linear_bias,
        attention_dropout=config.dropout,
        hidden_dropout=config.dropout,
        init_method_std=config.init_std,
        masked_softmax_fusion=False,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        **experts,
    )


def build_model(world: World, config: TrainConfig) -> list[DistributedDataParallel]:
    """This rank's model chunks, wrapped for their precision and for data parallelism."""
    shape = transformer_config(world, config)
    grouped = bool(world.num_experts and world.grouped_experts)
    spec = get_gpt_layer_local_spec(world.num_experts or None, grouped, normalization=world.normalization)
    stages = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    chunks: list[Any] = []
    for stage in range(stages or 1):
        vp_stage = stage if stages else None
        chunk = GPTModel(
            shape,
            spec,
            vocab_size=world.vocab_size,
            max_sequence_length=world.seq_length,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            share_embeddings_and_output_weights=world.tied_embeddings,
            position_embedding_type="rope" if world.rotary else "learned_absolute",
            rotary_base=config.rotary_base,
            vp_stage=vp_stage,
        ).cuda()
        chunk = Float16Module(shape, chunk) if shape.bf16 or shape.fp16 else chunk
        chunk.vp_stage = vp_stage
        chunks.append(chunk)
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=world.dtype != "fp32")
    return [DistributedDataParallel(shape, ddp, chunk, disable_bucketing=index > 0) for index, chunk in enumerate(chunks)]


def build_optimizer(chunks: list[DistributedDataParallel], config: TrainConfig) -> Any:
    """Megatron's optimizer of these chunks, and what its schedules read from their configuration."""
    shape = chunks[0].config
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            **config.model_dump(include=_OPTIMIZER),
            bf16=shape.bf16,
            fp16=shape.fp16,
            params_dtype=shape.params_dtype,
            initial_loss_scale=INITIAL_LOSS_SCALE,
        ),
        chunks,
    )
    shape.grad_scale_func = optimizer.scale_loss
    shape.finalize_model_grads_func = finalize_model_grads
    ddp = chunks[0].ddp_config
    if ddp.overlap_grad_reduce:
        shape.no_sync_func = _one_or_all([chunk.no_sync for chunk in chunks])
        if ddp.align_param_gather:
            shape.grad_sync_func = _one_or_all([chunk.start_grad_sync for chunk in chunks])
    if ddp.overlap_param_gather and ddp.align_param_gather:
        shape.param_sync_func = _one_or_all([chunk.start_param_sync for chunk in chunks])
    return optimizer


def build_scheduler(optimizer: Any, config: TrainConfig) -> OptimizerParamScheduler:
    """The learning rate over optimizer steps. A schedule given anew wins over that of a checkpoint."""
    last = config.decay_iters or config.train_iters
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=min(config.warmup_iters, last - 1),
        lr_decay_steps=last,
        lr_decay_style=config.decay,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=last,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )


def _one_or_all(functions: list[Any]) -> Any:
    return functions[0] if len(functions) == 1 else functions
