"""Linear layers whose weights are split along both dimensions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from mindspeed import plugins as ms
from mindspeed.features.tensor_parallel_2d.conditions import CONDITIONS, FILE_OF_RANK, NAME
from mindspeed.features.tensor_parallel_2d.costs import GROUPS, describe_costs, fits_ranks, grid_of
from mindspeed.tensor_parallel.pipeline import parts_that_fit

if TYPE_CHECKING:
    from mindspeed.features.tensor_parallel_2d.products import Grid

PARTS = 8
"""Of a product whose collectives overlap: all but an eighth can hide."""


class TensorParallel2DArgs(ms.FeatureArgs):
    x: int | Literal["auto"] = ms.Field(
        "auto",
        description="Grid size x of x * y = tp: output features are split over x ranks; auto = least communication",
    )
    y: int | Literal["auto"] = ms.Field(
        "auto",
        description="Grid size y of x * y = tp: input features are split over y ranks; 1 = plain tensor parallelism",
    )
    overlap_gather: bool = ms.Field(
        False,
        description="In forward: gather the input in chunks, and overlap each gather with the matrix product of another chunk",
    )
    overlap_scatter: bool = ms.Field(
        False,
        description="In forward: split the output into chunks, and overlap the reduce-scatter of each with the matrix product "
        "of another chunk",
    )
    overlap_backward: bool = ms.Field(
        False,
        description="In backward: transfer gradients in chunks, and overlap each with the matrix product of another chunk",
    )


class TensorParallel2D(ms.Feature[TensorParallel2DArgs]):
    """Split weights of linear layers over a 2-D grid.

    A grid of x by y ranks sends fewer bytes than a split along one dimension. As with sequence parallelism, activations
    between linear layers are split along the sequence.
    """

    spec = ms.FeatureSpec(
        name=NAME,
        category=ms.Category.COMMUNICATION,
        slots={ms.Slot.LINEAR},
        constraints=(
            ms.Requires(
                "sequence-parallel",
                reason="the linear layers of tensor-parallel-2d expect inputs that are split along the sequence",
            ),
            *CONDITIONS,
        ),
        numerics=ms.Numerics.reordered(reason="sums over the hidden dimension are split over ranks"),
        state=ms.CheckpointState("resharded", "weights are saved as blocks that any other layout can load"),
        verify_with=ms.VerifyWith(
            algorithm=("mindspeed.features.tensor_parallel_2d.products",), settings={NAME: {"x": 1, "y": 2}}, world={"tp": 2}
        ),
        own_trainer="from mindspeed.nn import ColumnParallelLinear, RowParallelLinear  # a mesh of two dimensions",
    )

    grid: Grid | None = None

    @property
    def overlaps(self) -> dict[str, bool]:
        """The overlap settings by what travels."""
        return {name.removeprefix("overlap_"): on for name, on in self.args if name.startswith("overlap_")}

    def parts_of(self, rows: int) -> int:
        """The number of parts for ``rows`` rows of a rank's share."""
        return parts_that_fit(NAME, PARTS, rows, fix=f"use a longer sequence, or remove the overlap settings of {NAME}")

    @ms.hookimpl
    def notes(self) -> Iterable[str]:
        yield from describe_costs(self.args, self.world)
        if not fits_ranks(self.args, self.world):
            return
        is_plain = grid_of(self.args, self.world)[1] == 1
        if is_plain and not any(self.overlaps.values()):
            yield "with y=1 and no overlap every linear layer remains Megatron's; set y or an overlap"
        if not is_plain and self.world.knows("checkpoint_format") and self.world.checkpoint_format == FILE_OF_RANK:
            yield "checkpoints of format torch have a file for each rank of the grid, so only the same x and y load them"

    @ms.hookimpl
    def patches(self) -> list[ms.Patch]:
        return [
            ms.Wrap(
                "megatron.core.transformer.mlp:apply_swiglu_sharded_factory",
                "mindspeed.features.tensor_parallel_2d.layers:with_both_axes",
                reason="saves gated MLP weights split along two dimensions; Megatron supports only one dimension",
                phase="checkpoint",
                optional=True,
            ),
            ms.Wrap(
                "megatron.core.optimizer.muon:get_megatron_muon_optimizer",
                "mindspeed.features.tensor_parallel_2d.refusals:refusing",
                reason="stops when Megatron creates the Muon optimizer, which supports only weights split along one dimension",
                when=ms.When(megatron=">=0.16"),
                phase="build",
                optional=True,
            ),
        ]

    @ms.hookimpl
    def communicators(self) -> Sequence[str]:
        return [name for name, ranks in zip(GROUPS, grid_of(self.args, self.world), strict=True) if ranks > 1]

    @ms.hookimpl
    def groups_created(self, sizes: dict[str, int], get_group: Callable[[str], Any]) -> None:
        from mindspeed.features.tensor_parallel_2d.products import make_grid
        from mindspeed.features.tensor_parallel_2d.refusals import grid_is_unknown

        try:
            _, y = grid_of(self.args, ms.World({**self.world.known(), "tp": sizes["tp"]}))
        except ms.UnknownValue as unknown:
            raise ms.MindSpeedError([grid_is_unknown(unknown.fields)]) from None
        self.grid = make_grid(get_group("tp"), y)

    @ms.hookimpl
    def groups_destroyed(self) -> None:
        from mindspeed.features.tensor_parallel_2d.products import destroy_grid

        if self.grid is not None:
            destroy_grid(self.grid)
        self.grid = None

    @ms.hookimpl
    def layer_spec(self, spec: Any, config: Any) -> Any:
        from mindspeed.features.tensor_parallel_2d.layers import ColumnParallelLinear2D, RowParallelLinear2D
        from mindspeed.tensor_parallel.layers import with_linear_layers

        return with_linear_layers(spec, ColumnParallelLinear2D, RowParallelLinear2D)
