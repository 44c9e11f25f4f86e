"""Conditions of features that exchange the linear layers of tensor parallelism. Light."""

from __future__ import annotations

from typing import Any, Final

from mindspeed.job.world import World
from mindspeed.plugins.conditions import ModelCondition, condition, unset
from mindspeed.plugins.shared_conditions import NO_TRANSFORMER_ENGINE_LAYERS
from mindspeed.problems.fixes import GiveField, RemoveFeature


@condition(
    "tp is {world.tp}, so linear layers are not split over ranks and exchange no data",
    fix=(GiveField("tp", 2, or_more=True), RemoveFeature()),
    otherwise="idle",
)
def layers_have_collectives(args: Any, world: World) -> bool:
    """Check that several ranks share a linear layer."""
    return bool(world.tp > 1)


LINEAR_LAYERS: Final = (
    layers_have_collectives,
    NO_TRANSFORMER_ENGINE_LAYERS,
    unset(
        "tensor_parallel_overlap",
        "tp_comm_overlap works only in Transformer Engine's layers, but {feature} works only in Megatron's local layers, so "
        "tp_comm_overlap would have no effect",
    ),
    ModelCondition(
        "mindspeed.tensor_parallel.layers:missing_linear_layers",
        "the layers use Megatron's ColumnParallelLinear and RowParallelLinear",
        subject="spec",
        fix=(GiveField("transformer_engine_layers", False), RemoveFeature()),
    ),
)
"""Conditions of features that replace linear layers."""
