"""Conditions of a grid of ranks: its size, the model's, and options that weights with two split dimensions do not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any, Final, NoReturn

from mindspeed import plugins as ms
from mindspeed.features.tensor_parallel_2d.costs import GridSettings, fits_ranks, grid_of
from mindspeed.tensor_parallel.conditions import LINEAR_LAYERS

NAME: Final = "tensor-parallel-2d"
MUON: Final = "Muon supports only weights split along one dimension, but {feature} splits linear layers along both"
NOT_MUON: Final = (ms.Fix.give_field("optimizer", "adam"), ms.Fix.remove_feature(NAME))
_FORMATS: Final = ("torch_dist", "zarr")
"""Formats of checkpoints that say where each part of a weight lies."""
_AUTO: Final = (ms.Fix.together((ms.Fix.give_setting("x", "auto"), ms.Fix.give_setting("y", "auto"))),)


@ms.condition("a grid of x={args.x} by y={args.y} does not match tp={world.tp} ranks", fix=_AUTO)
def grid_has_the_ranks(args: GridSettings, world: ms.World) -> bool:
    """Check that the grid has as many ranks as tensor parallelism."""
    return fits_ranks(args, world)


@ms.condition("hidden size {world.hidden_size} is not divisible by y={args.y} of the {args.x} x {args.y} grid", fix=_AUTO)
def grid_splits_hidden(args: GridSettings, world: ms.World) -> bool:
    """Check that y divides the hidden size; a grid of another number of ranks is not judged."""
    return bool(not fits_ranks(args, world) or world.hidden_size % grid_of(args, world)[1] == 0)


@ms.condition(
    "weight_shards is {world.weight_shards}, so Megatron (--tensor-parallel-num-weight-shards) splits the weights of each "
    "tensor-parallel rank again, which {feature} does not support",
    fix=(ms.Fix.give_field("weight_shards", 1), ms.Fix.remove_feature()),
)
def weights_are_whole(args: GridSettings, world: ms.World) -> bool:
    """Check that no further ranks share the weight of a linear layer."""
    return bool(world.weight_shards == 1)


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
    """Check that checkpoints have the place of each block; with y = 1 weights are split as Megatron splits them."""
    if world.checkpoint_format in _FORMATS or not fits_ranks(args, world):
        return True
    return grid_of(args, world)[1] == 1


CONDITIONS: Final = (
    *LINEAR_LAYERS,
    grid_has_the_ranks,
    grid_splits_hidden,
    weights_are_whole,
    ms.unset(
        "shared_expert_overlap",
        "shared experts skip the collectives of their linear layers (moe_shared_expert_overlap), which {feature} needs",
    ),
    checkpoints_know_both_dimensions,
    optimizer_is_not_muon,
    ms.ModelCondition(
        "mindspeed.features.tensor_parallel_2d.conditions:muon_optimizers",
        "the optimizer is not Muon",
        subject="optimizer",
        fix=NOT_MUON,
    ),
)


def muon_optimizers(feature: ms.Feature[Any], optimizer: Any) -> Iterator[str]:
    """Say that a built optimizer is, or contains, one that orthogonalizes weights."""
    members = getattr(optimizer, "chained_optimizers", [optimizer])
    if any("muon" in str(getattr(getattr(member, "config", None), "optimizer", "")) for member in members):
        yield MUON


def refusing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that makes a Muon optimizer, which a script may call itself. Raises MS304."""

    @wraps(original)
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise ms.MindSpeedError([ms.Problem("MS304", f"{NAME}: {MUON}", (NAME,), fix=NOT_MUON)])

    return refuse


def grid_is_unknown(fields: Iterable[str]) -> ms.Problem:
    """Return the problem of a grid to choose where values of the model are not known."""
    unknown = ", ".join(fields)
    text = f"{NAME}: x=auto and y=auto choose the grid by {unknown}, which the plan does not know"
    fix = (
        ms.Fix.advise(f"give {unknown} as an option or in the job file"),
        ms.Fix.give_setting(f"{NAME}.y", 2, note="for a fixed grid"),
    )
    return ms.Problem("MS304", text, (NAME,), fix=fix)


class SplitAlongBothDimensions:
    """The ``partition_dim`` of a weight that is split along both dimensions: who reads it as a number is refused.

    Whatever joins the weights of all ranks along one dimension would get a wrong whole weight. Raises MS304.
    """

    def __index__(self) -> int:
        self._refuse()

    __int__ = __index__

    def __eq__(self, other: object) -> bool:
        return self._refuse() if isinstance(other, int) else self is other

    def __hash__(self) -> int:
        return id(self)

    def _refuse(self) -> NoReturn:
        text = (
            f"{NAME}: code outside this feature reads partition_dim, the dimension along which a weight is split, but this "
            "weight is split along two dimensions"
        )
        fix = (
            "find the calling code with MINDSPEED_TRACE=1. If it joins the weights of all ranks, save a distributed checkpoint "
            "and let it load the whole weight from there. Or split weights along one dimension, where x=auto means all "
            f"tensor-parallel ranks: --set {NAME}.x=auto --set {NAME}.y=1"
        )
        raise ms.MindSpeedError([ms.Problem("MS304", text, (NAME,), fix=ms.Fix.advise(fix))])
