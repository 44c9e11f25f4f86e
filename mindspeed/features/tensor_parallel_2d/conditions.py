"""Conditions of a grid of ranks: its size, the model's, and options that weights with two split dimensions do not fit."""

from __future__ import annotations

from typing import Final

from mindspeed import plugins as ms
from mindspeed.features.tensor_parallel_2d.costs import GridSettings, fits_ranks, grid_of
from mindspeed.tensor_parallel.conditions import LINEAR_LAYERS

NAME: Final = "tensor-parallel-2d"
MUON: Final = "Muon supports only weights split along one dimension, but {feature} splits linear layers along both"
NOT_MUON: Final = (ms.Fix.give_field("optimizer", "adam"), ms.Fix.remove_feature(NAME))
FILE_OF_RANK: Final = "torch"
"""Format of checkpoints with a file for each tensor-parallel rank, whatever its weights are."""
_FORMATS: Final = (FILE_OF_RANK, "torch_dist", "zarr")
"""Formats of checkpoints that take a block of a weight as it is, or say where each block lies."""
_AUTO: Final = (ms.Fix.together((ms.Fix.give_setting("x", "auto"), ms.Fix.give_setting("y", "auto"))),)


@ms.condition("a grid of x={args.x} by y={args.y} does not match tp={world.tp} ranks", fix=_AUTO)
def grid_has_the_ranks(args: GridSettings, world: ms.World) -> bool:
    """Check that the grid has as many ranks as tensor parallelism."""
    return fits_ranks(args, world)


@ms.condition("hidden size {world.hidden_size} is not divisible by y={args.y} of the {args.x} x {args.y} grid", fix=_AUTO)
def grid_splits_hidden(args: GridSettings, world: ms.World) -> bool:
    """Check that y divides the hidden size; a grid of another number of ranks is not judged."""
    return bool(not fits_ranks(args, world) or world.hidden_size % grid_of(args, world)[1] == 0)


@ms.condition(MUON, fix=NOT_MUON)
def optimizer_is_not_muon(args: GridSettings, world: ms.World) -> bool:
    """Check that the optimizer reads no split dimension; an unknown optimizer is checked when it is built."""
    return not (world.knows("optimizer") and "muon" in world.optimizer)


@ms.condition(
    "checkpoint format {world.checkpoint_format} supports only weights split along one dimension, but {feature} splits along "
    "both unless y=1",
    fix=(
        ms.Fix.give_field("checkpoint_format", "torch_dist"),
        ms.Fix.together((ms.Fix.give_setting("x", "auto"), ms.Fix.give_setting("y", 1))),
    ),
)
def checkpoints_know_both_dimensions(args: GridSettings, world: ms.World) -> bool:
    """Check that checkpoints can have blocks of weights; with y = 1 weights are split as Megatron splits them."""
    if world.checkpoint_format in _FORMATS or not fits_ranks(args, world):
        return True
    return grid_of(args, world)[1] == 1


CONDITIONS: Final = (
    *LINEAR_LAYERS,
    grid_has_the_ranks,
    grid_splits_hidden,
    ms.Condition.equals(
        "weight_shards",
        1,
        "weight_shards is {world.weight_shards}, so Megatron (--tensor-parallel-num-weight-shards) splits the weights of each "
        "tensor-parallel rank again, which {feature} does not support",
    ),
    ms.Condition.unset(
        "shared_expert_overlap",
        "shared experts skip the collectives of their linear layers (moe_shared_expert_overlap), which {feature} needs",
    ),
    checkpoints_know_both_dimensions,
    optimizer_is_not_muon,
    ms.ModelCondition(
        "mindspeed.features.tensor_parallel_2d.refusals:muon_optimizers",
        "the optimizer is not Muon",
        subject="optimizer",
        fix=NOT_MUON,
    ),
)
