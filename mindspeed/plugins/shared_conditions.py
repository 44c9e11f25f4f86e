"""Conditions on the job that several features declare: each fact, sentence and fix stands once."""

from __future__ import annotations

from typing import Any, Final

from mindspeed.job.world import World
from mindspeed.plugins.conditions import Condition, condition
from mindspeed.problems import Fix

_REMOVE: Final = Fix.remove_feature()

NO_CUDA_GRAPHS: Final = Condition.unset("cuda_graphs", "layers are captured as CUDA graphs, which {feature} does not support")
NO_LOW_PRECISION: Final = Condition.unset(
    "low_precision", "linear layers compute in fp8 or fp4, which {feature} does not support"
)
NO_OVERLAPPED_MICRO_BATCHES: Final = Condition.unset(
    "overlapped_micro_batches",
    "Megatron overlaps expert all-to-alls with computation of another micro-batch (overlap_moe_expert_parallel_comm), "
    "which {feature} does not support",
)
NO_FSDP: Final = Condition.unset(
    "fsdp", "parameters are fully sharded over data-parallel ranks (FSDP), which {feature} does not support"
)


@condition(
    "layers are Transformer Engine's, but {feature} supports only Megatron's local layers",
    fix=(Fix.give_field("transformer_engine_layers", False), _REMOVE),
)
def no_transformer_engine_layers(args: Any, world: World) -> bool:
    """Check that layers are Megatron's local ones, or classes over them in the roles of Transformer Engine's."""
    return not world.is_set("transformer_engine_layers") or world.is_set("engine_over_local")


NO_TRANSFORMER_ENGINE_LAYERS: Final = no_transformer_engine_layers
NO_CPU_OFFLOADING: Final = Condition.unset(
    "cpu_offloading", "Megatron offloads activations to host memory, which {feature} does not support"
)
NO_FINE_GRAINED_OFFLOADING: Final = Condition.unset(
    "fine_grained_offloading",
    "Megatron offloads activations of single modules to host memory, which {feature} does not support",
)


NO_OTHER_PASSES: Final = (
    NO_CUDA_GRAPHS,
    NO_LOW_PRECISION,  # its layers are Transformer Engine's, whose linear layers and checkpoints are others
    NO_OVERLAPPED_MICRO_BATCHES,
    NO_FSDP,
    NO_FINE_GRAINED_OFFLOADING,
)
"""Conditions of features that repeat forward passes or move saved activations."""


has_experts = Condition.at_least(
    "num_experts",
    1,
    "the model is dense, but {feature} needs a MoE model",
    fix=(Fix.give_field("num_experts"), _REMOVE),
    selects=True,
)
