"""The model and its optimizer in plain Megatron: shape from the plan's world, every size of a layout through the bridge."""

from __future__ import annotations

from typing import Any, Final

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_layer_with_transformer_engine_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from mindspeed.job.world import World
from mindspeed.megatron import gpt
from mindspeed.workbench.training.config import TrainConfig

INITIAL_LOSS_SCALE: Final = 2.0**16
"""First loss scale of fp16; Megatron's own, 2**32, costs a small run its first sixteen steps."""
_OPTIMIZER: Final = {"lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad"}


def build_model(world: World, config: TrainConfig) -> list[DistributedDataParallel]:
    """This rank's model chunks, wrapped for their precision and for data parallelism."""
    shape = gpt.gpt_config(
        world,
        config.dropout,
        layernorm_epsilon=config.norm_epsilon,
        init_method_std=config.init_std,
        moe_aux_loss_coeff=config.aux_loss_coeff,
    )
    grouped = bool(world.num_experts and world.grouped_experts)
    if world.is_set("engine_over_local"):
        spec = get_gpt_layer_with_transformer_engine_spec(world.num_experts or None, grouped)
    else:
        spec = get_gpt_layer_local_spec(world.num_experts or None, grouped, normalization=world.normalization)
    chunks = gpt.build_chunks(shape, world, lambda stage: (spec, None), rotary_base=config.rotary_base)
    return gpt.wrapped(chunks, DistributedDataParallelConfig(grad_reduce_in_fp32=world.dtype != "fp32"))


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
    gpt.connect(chunks)
    return optimizer


def build_scheduler(optimizer: Any, config: TrainConfig) -> OptimizerParamScheduler:
    """The learning rate over optimizer steps. A schedule of the job overrides that of a checkpoint."""
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
