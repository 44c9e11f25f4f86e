"""The tiny model of a proof, in plain Megatron: nothing here knows a feature, sizes come to it through the plan's overrides."""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from mindspeed.verification.placement import fill_weights
from mindspeed.verification.shape import LATENT, GptShape, Recipe

FLATNESS: Final = 1e6
"""Epsilon of Adam. It dwarfs every gradient, so that a step is the gradient times the learning rate to 1e-6: steepest
descent through the only optimizer that Megatron's distributed optimizer accepts. Plain Adam would hide a gradient that
is a constant factor wrong."""
LEARNING_RATE: Final = 0.25
BUCKET_SIZE: Final = 8192
"""Elements in a bucket of gradients. In Megatron's own size the tiny model is one bucket, and nothing overlaps."""


def transformer_config(shape: GptShape, dtype: torch.dtype) -> TransformerConfig:
    """The shape as Megatron's configuration, without any size of a layout."""
    experts: dict[str, Any] = {}
    if shape.num_experts:
        experts = {
            "num_moe_experts": shape.num_experts,
            "moe_router_topk": shape.router_topk,
            "moe_router_load_balancing_type": "aux_loss",
            "moe_aux_loss_coeff": 1e-2,
            "moe_ffn_hidden_size": shape.ffn_hidden_size,
            "moe_shared_expert_intermediate_size": shape.shared_expert_hidden_size or None,
            "moe_expert_capacity_factor": shape.expert_capacity_factor or None,
            "moe_pad_expert_input_to_capacity": shape.padded_experts,
            "moe_grouped_gemm": shape.grouped_experts,
        }
    options = {name: list(value) if isinstance(value, tuple) else value for name, value in shape.options}
    latent = shape.multi_latent_attention
    return (MLATransformerConfig if latent else TransformerConfig)(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_hidden_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_attention_heads if latent else shape.num_query_groups,
        normalization=shape.normalization,
        gated_linear_unit=shape.gated_linear_unit,
        activation_func=getattr(F, shape.activation),
        add_bias_linear=shape.linear_bias,
        attention_dropout=shape.dropout,
        hidden_dropout=shape.dropout,
        perform_initialization=False,
        masked_softmax_fusion=False,
        deallocate_pipeline_outputs=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        mtp_num_layers=shape.mtp_num_layers or None,
        **(experts | (LATENT if latent else {}) | options),
    )


def layer_specs(config: TransformerConfig, shape: GptShape, vp_stage: int | None) -> tuple[Any, Any]:
    """The specs of the decoder and of multi-token prediction, None where this chunk has none of the latter."""
    latent, norm = shape.multi_latent_attention, shape.normalization
    if config.moe_layer_freq == 1 or not shape.num_experts:
        decoder = get_gpt_layer_local_spec(shape.num_experts or None, multi_latent_attention=latent, normalization=norm)
    else:
        decoder = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=norm, vp_stage=vp_stage)
    if not shape.mtp_num_layers:
        return decoder, None
    return decoder, get_gpt_mtp_block_spec(config, decoder, use_transformer_engine=False, vp_stage=vp_stage)


def build_chunks(recipe: Recipe) -> list[DistributedDataParallel]:
    """This rank's model chunks with the recipe's weights, wrapped for data parallelism as Megatron's trainer does it."""
    shape = recipe.shape
    dtype = torch.bfloat16 if recipe.dtype == "bf16" else torch.float32
    config = transformer_config(shape, dtype)
    latent = shape.multi_latent_attention
    stages = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    chunks = []
    for stage in range(stages or 1):
        vp_stage = stage if stages else None
        decoder, prediction = layer_specs(config, shape, vp_stage)
        chunk = GPTModel(
            config,
            decoder,
            vocab_size=shape.vocab_size,
            max_sequence_length=shape.seq_length,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            share_embeddings_and_output_weights=shape.tied_embeddings,
            position_embedding_type="rope" if shape.rotary or latent else "learned_absolute",
            vp_stage=vp_stage,
            mtp_block_spec=prediction,
        ).cuda()
        chunk.vp_stage = vp_stage
        chunks.append(chunk)
    fill_weights(chunks, recipe.seed)
    if config.bf16:
        chunks = [Float16Module(config, chunk) for chunk in chunks]
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    if ddp_config.bucket_size is None:
        ddp_config.bucket_size = BUCKET_SIZE
    return [
        DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=index > 0) for index, chunk in enumerate(chunks)
    ]


_DESCENT: Final[dict[str, Any]] = {
    "lr": LEARNING_RATE * FLATNESS,
    "adam_beta1": 0.0,
    "adam_beta2": 0.0,
    "adam_eps": FLATNESS,
    "weight_decay": 0.0,
    "clip_grad": 0.0,
}


def build_optimizer(chunks: list[DistributedDataParallel], adam: bool = False) -> Any:
    """Megatron's optimizer, set to steepest descent without clipping or decay; or plain Adam with both."""
    values = {"lr": 1e-2, "weight_decay": 0.1, "clip_grad": 1.0} if adam else _DESCENT
    config = OptimizerConfig(
        optimizer="adam",
        **values,
        bf16=chunks[0].config.bf16,
        params_dtype=chunks[0].config.params_dtype,
    )
    return get_megatron_optimizer(config, chunks)
