"""The configurations of megatron-core that the trainer makes, as values. Light."""

from __future__ import annotations

from typing import Final

from mindspeed.job.world import World
from mindspeed.megatron.configuration import DTYPES, BuiltConfiguration, gpt_configuration
from mindspeed.workbench.training.config import TrainConfig

INITIAL_LOSS_SCALE: Final = 2.0**16
"""First loss scale of fp16; Megatron's own, 2**32, costs a small run its first sixteen steps."""
_OPTIMIZER: Final = {"lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad"}


def of_model(world: World, config: TrainConfig) -> BuiltConfiguration:
    """Return the configuration of the model."""
    return gpt_configuration(
        world,
        config.dropout,
        layernorm_epsilon=config.norm_epsilon,
        init_method_std=config.init_std,
        moe_aux_loss_coeff=config.aux_loss_coeff,
    )


def of_data_parallelism(world: World) -> BuiltConfiguration:
    """Return the configuration of gradients over data-parallel ranks."""
    kind = "megatron.core.distributed.distributed_data_parallel_config:DistributedDataParallelConfig"
    return BuiltConfiguration(kind, {"grad_reduce_in_fp32": world.dtype != "fp32"})


def of_optimizer(world: World, config: TrainConfig) -> BuiltConfiguration:
    """Return the configuration of the optimizer."""
    values = {
        "optimizer": "adam",
        **config.model_dump(include=_OPTIMIZER),
        "bf16": world.dtype == "bf16",
        "fp16": world.dtype == "fp16",
        "initial_loss_scale": INITIAL_LOSS_SCALE,
    }
    kind = "megatron.core.optimizer.optimizer_config:OptimizerConfig"
    return BuiltConfiguration(kind, values, {"params_dtype": DTYPES[world.dtype]})


def of_job(world: World, config: TrainConfig) -> tuple[BuiltConfiguration, ...]:
    """Return every configuration of a job."""
    return of_model(world, config), of_data_parallelism(world), of_optimizer(world, config)
