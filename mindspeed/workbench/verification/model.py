"""The tiny model of a proof, in plain Megatron: nothing here knows a feature, sizes come to it through the plan's overrides."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Final

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.transformer_config import TransformerConfig

from mindspeed.engine.runtime import session
from mindspeed.job.world import World
from mindspeed.megatron import gpt
from mindspeed.megatron.configuration import gpt_configuration
from mindspeed.workbench.verification.placement import fill_weights
from mindspeed.workbench.verification.shape import INDEXER, LATENT, GptShape, Recipe

FLATNESS: Final = 1e6
"""Epsilon of Adam. It dwarfs every gradient, so that a step is the gradient times the learning rate to 1e-6: steepest
descent through the only optimizer that Megatron's distributed optimizer accepts. Plain Adam would hide a gradient that
is a constant factor wrong."""
LEARNING_RATE: Final = 0.25
BUCKET_SIZE: Final = 8192
"""Elements in a bucket of gradients. In Megatron's own size the tiny model is one bucket, and nothing overlaps."""


def model_config(recipe: Recipe) -> TransformerConfig:
    """Megatron's configuration of the recipe's model, without any size of a layout."""
    shape = recipe.shape
    values: dict[str, Any] = {"perform_initialization": False, "deallocate_pipeline_outputs": True, "moe_aux_loss_coeff": 1e-2}
    if shape.multi_latent_attention:
        values |= LATENT | {"num_query_groups": shape.num_attention_heads}
    if shape.indexer_topk:
        values |= INDEXER | {"dsa_indexer_topk": shape.indexer_topk}
    values |= {name: list(value) if isinstance(value, tuple) else value for name, value in shape.options}
    return gpt_configuration(World(recipe.world()), shape.dropout, **values).made()


def layer_specs(config: TransformerConfig, shape: GptShape, vp_stage: int | None) -> tuple[Any, Any]:
    """The specs of the decoder and of multi-token prediction, None where this chunk has none of the latter."""
    latent, norm, engine = shape.multi_latent_attention, shape.normalization, _builds_engine_layers()
    experts = shape.num_experts or None
    if shape.indexer_topk:
        from megatron.core.models.gpt import experimental_attention_variant_module_specs as specs  # since Megatron 0.16

        decoder = specs.get_transformer_block_with_experimental_attention_variant_spec(config, vp_stage)
    elif experts and config.moe_layer_freq != 1:
        decoder = get_gpt_decoder_block_spec(config, use_transformer_engine=engine, normalization=norm, vp_stage=vp_stage)
    elif engine:
        kinds = {"moe_grouped_gemm": shape.grouped_experts, "qk_layernorm": config.qk_layernorm}
        decoder = get_gpt_layer_with_transformer_engine_spec(experts, multi_latent_attention=latent, **kinds)
    else:
        decoder = get_gpt_layer_local_spec(experts, multi_latent_attention=latent, normalization=norm)
    if not shape.mtp_num_layers:
        return decoder, None
    return decoder, get_gpt_mtp_block_spec(config, decoder, use_transformer_engine=engine, vp_stage=vp_stage)


def _builds_engine_layers() -> bool:
    """Return whether the active plan has layers in the roles of Transformer Engine's."""
    active = session.current()
    return active is not None and active.plan.world.is_set("engine_over_local")


def build_chunks(recipe: Recipe) -> list[DistributedDataParallel]:
    """This rank's model chunks with the recipe's weights, wrapped for data parallelism as Megatron's trainer does it."""
    config = model_config(recipe)
    shape = recipe.shape if parallel_state.get_pipeline_model_parallel_world_size() > 1 else recipe.shape.of_one_stage()
    world = World(replace(recipe, shape=shape).world())
    chunks = gpt.build_chunks(config, world, partial(layer_specs, config, recipe.shape))
    fill_weights(chunks, recipe.seed)
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    if ddp_config.bucket_size is None:
        ddp_config.bucket_size = BUCKET_SIZE
    return gpt.wrapped(chunks, ddp_config)


_DESCENT: Final[dict[str, Any]] = {
    "lr": LEARNING_RATE * FLATNESS,
    "adam_beta1": 0.0,
    "adam_beta2": 0.0,
    "adam_eps": FLATNESS,
    "weight_decay": 0.0,
    "clip_grad": 0.0,
}
_ADAM: Final = {"lr": 2e-3, "weight_decay": 0.1, "clip_grad": 1.0, "adam_eps": 1e-3}
"""Epsilon is well above the rounding of a gradient, of which a smaller one would make a step where the gradient is zero."""


def build_optimizer(chunks: list[DistributedDataParallel], adam: bool = False) -> Any:
    """Megatron's optimizer, set to steepest descent without clipping or decay; or plain Adam with both."""
    values = _ADAM if adam else _DESCENT
    model = chunks[0].config
    config = OptimizerConfig(optimizer="adam", **values, bf16=model.bf16, params_dtype=model.params_dtype)
    return get_megatron_optimizer(config, chunks)
