"""Linear layers whose weights are split along both dimensions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from mindspeed.features.tensor_parallel_2d.costs import describe_costs, fits_ranks, grid_of, splits_hidden
from mindspeed.features.tensor_parallel_2d.refusals import refuse_model, refuse_muon
from mindspeed.plugins import (
    Category,
    Check,
    CheckpointState,
    Feature,
    FeatureArgs,
    FeatureSpec,
    Field,
    GiveField,
    MindSpeedError,
    Numerics,
    Patch,
    Problem,
    RemoveFeature,
    Requires,
    Slot,
    UnknownValue,
    VerifyWith,
    When,
    World,
    Wrap,
    hookimpl,
)
from mindspeed.plugins.fixes import Advice
from mindspeed.tensor_parallel.pipeline import parts_that_fit

if TYPE_CHECKING:
    from mindspeed.features.tensor_parallel_2d.products import Grid

_NAME = "tensor-parallel-2d"
_AUTO = f"--set {_NAME}.x=auto --set {_NAME}.y=auto"
PARTS = 8
"""Of a product whose collectives overlap: all but an eighth can hide."""


class TensorParallel2DArgs(FeatureArgs):
    x: int | Literal["auto"] = Field(
        "auto", description="ranks over which output features of a column-parallel weight are split"
    )
    y: int | Literal["auto"] = Field("auto", description="ranks over which its inputs are split; 1 is one dimension")
    overlap_gather: bool = Field(False, description="forward: parts of the input are gathered while others are multiplied")
    overlap_scatter: bool = Field(False, description="forward: parts of the output are summed while others are multiplied")
    overlap_backward: bool = Field(False, description="backward: parts of the gradients travel while others are multiplied")


class TensorParallel2D(Feature[TensorParallel2DArgs]):
    """Split the weights of linear layers over a grid of x by y ranks, with the inputs and outputs of sequence parallelism."""

    spec = FeatureSpec(
        name=_NAME,
        summary="Weights of linear layers split along both dimensions, so that large tensor-parallel groups send fewer bytes",
        category=Category.COMMUNICATION,
        slots={Slot.LINEAR},
        constraints=(
            Requires("sequence-parallel", reason="its layers have the inputs and outputs of sequence parallelism"),
            Check(
                lambda args, world: world.tp > 1,
                "there is no grid of {world.tp} tensor-parallel rank",
                fix=(GiveField("tp", 2, or_more=True), RemoveFeature()),
            ),
            Check(
                fits_ranks, "a grid of x = {args.x} by y = {args.y} does not have {world.tp} tensor-parallel ranks", fix=_AUTO
            ),
            Check(
                splits_hidden,
                "a hidden size of {world.hidden_size} cannot be split over y ranks of the grid x = {args.x}, y = {args.y}",
                fix=_AUTO,
            ),
        ),
        applies=lambda args, world: world.tp > 1,
        notes=describe_costs,
        numerics=Numerics.reordered(reason="sums over the hidden dimension are split over ranks"),
        state=CheckpointState("resharded", "weights are saved as blocks that any other split can load"),
        verify_with=VerifyWith(
            algorithm=("mindspeed.features.tensor_parallel_2d.products",), settings={_NAME: {"x": 1, "y": 2}}, world={"tp": 2}
        ),
    )

    grid: Grid | None = None

    @property
    def overlaps(self) -> dict[str, bool]:
        """The overlap settings by what travels."""
        return {name.removeprefix("overlap_"): on for name, on in self.args if name.startswith("overlap_")}

    def parts_of(self, rows: int) -> int:
        """The number of parts for ``rows`` rows of a rank's share."""
        return parts_that_fit(_NAME, PARTS, rows, fix=f"use a longer sequence, or remove the overlap settings of {_NAME}")

    @hookimpl
    def patches(self) -> list[Patch]:
        return [
            Wrap(
                "megatron.core.transformer.mlp:apply_swiglu_sharded_factory",
                "mindspeed.features.tensor_parallel_2d.layers:with_both_axes",
                reason="a gated MLP's checkpoint has gates and values apart, and Megatron's factory knows one sharded axis",
                phase="checkpoint",
                optional=True,
            ),
            Wrap(
                "megatron.core.optimizer.muon:get_megatron_muon_optimizer",
                "mindspeed.features.tensor_parallel_2d.refusals:refusing",
                reason="Muon reads one split dimension of a weight, and these have two",
                when=When(megatron=">=0.16"),
                phase="build",
                optional=True,
            ),
        ]

    @hookimpl
    def groups_created(self, sizes: dict[str, int], get_group: Callable[[str], Any]) -> None:
        from mindspeed.features.tensor_parallel_2d.groups import make_grid

        try:
            _, y = grid_of(self.args, World({**self.world.known(), "tp": sizes["tp"]}))
        except UnknownValue as unknown:
            text = f"{_NAME}: x and y are auto, and {', '.join(unknown.fields)} of the model is not known"
            raise MindSpeedError([Problem("MS304", text, (_NAME,), fix=Advice(f"--set {_NAME}.y=2"))]) from None
        self.grid = make_grid(get_group("tp"), y)

    @hookimpl
    def groups_destroyed(self) -> None:
        from mindspeed.features.tensor_parallel_2d.groups import destroy_grid

        if self.grid is not None:
            destroy_grid(self.grid)
        self.grid = None

    @hookimpl
    def optimizer_built(self, optimizer: Any) -> None:
        refuse_muon(optimizer)

    @hookimpl
    def layer_spec(self, spec: Any, config: Any) -> Any:
        refuse_model(config)
        from mindspeed.features.tensor_parallel_2d.layers import ColumnParallelLinear2D, RowParallelLinear2D
        from mindspeed.tensor_parallel.layers import with_linear_layers

        return with_linear_layers(spec, config, self, ColumnParallelLinear2D, RowParallelLinear2D)
