"""Megatron's linear layers with weights that are split along both dimensions, and their checkpoints.

Rank i * y + j of a tensor-parallel group is (i, j). A column-parallel weight has the output features of the ranks (i, *), in
their order, and the input features j of y; a row-parallel weight the other way round. Both have as many numbers as Megatron's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor

from mindspeed import plugins as ms
from mindspeed.features.tensor_parallel_2d.products import Grid, Overlap, Products2D, column_products, row_products
from mindspeed.features.tensor_parallel_2d.refusals import SplitAlongBothDimensions
from mindspeed.tensor_parallel.layers import ColumnLinear, RowLinear
from mindspeed.tensor_parallel.linear import Products

if TYPE_CHECKING:
    from mindspeed.features.tensor_parallel_2d.feature import TensorParallel2D

_NAME = "tensor-parallel-2d"


class ColumnParallelLinear2D(ColumnLinear):
    """From hidden states to features."""

    def __init__(self, input_size: int, output_size: int, **options: Any) -> None:
        whole = _wants_whole_weight(options)
        super().__init__(input_size, output_size, **options | whole)
        self._products_2d: Products2D | None = None
        if not self.is_expert and self.weight is not None:
            feature, grid = _feature_and_grid(self.tp_group)
            _require_split(input_size, grid, "an input")
            self._products_2d = _products(column_products, feature, grid)
            _split_weight(self, grid, 0, options.get("stride", 1), bool(whole))

    def products(self, sequence_parallel: bool) -> Products | None:
        return self._products_2d

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        """The weight is sharded along both axes, the bias as Megatron has it."""
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        return state if self._products_2d is None else _with_split_weight(state, prefix, sharded_offsets, 0, self.tp_group)


class RowParallelLinear2D(RowLinear):
    """From features to hidden states."""

    def __init__(self, input_size: int, output_size: int, **options: Any) -> None:
        whole = _wants_whole_weight(options)
        super().__init__(input_size, output_size, **options | whole)
        self._products_2d: Products2D | None = None
        if not self.is_expert:
            feature, grid = _feature_and_grid(self.tp_group)
            _require_split(output_size, grid, "an output")
            self._products_2d = _products(row_products, feature, grid)
            _split_weight(self, grid, 1, options.get("stride", 1), bool(whole))

    def products(self, sequence_parallel: bool) -> Products | None:
        return self._products_2d

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        """The weight is sharded along both axes."""
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        return state if self._products_2d is None else _with_split_weight(state, prefix, sharded_offsets, 1, self.tp_group)


def _feature_and_grid(tp_group: Any) -> tuple[TensorParallel2D, Grid]:
    feature: TensorParallel2D | None = ms.active_feature(_NAME)
    if feature is None or feature.grid is None or feature.grid.ranks != tp_group.size():
        text = f"{_NAME}: a layer is built for {tp_group.size()} ranks before the process groups of the grid were created"
        fix = "call Megatron's initialize_model_parallel before building the model"
        raise ms.MindSpeedError([ms.Problem("MS304", text, (_NAME,), fix=ms.Fix.advise(fix))])
    return feature, feature.grid


def _products(make: Callable[..., Products2D], feature: TensorParallel2D, grid: Grid) -> Products2D | None:
    """Make the products of a layer, or None where one dimension without overlap leaves Megatron's own."""
    overlap = Overlap(**feature.overlaps)
    return None if grid.y == 1 and overlap == Overlap() else make(grid, overlap, feature.parts_of)


def _require_split(features: int, grid: Grid, what: str) -> None:
    if features % grid.y:
        text = f"{_NAME}: the {features} features of {what} are not divisible by y={grid.y}"
        fix = f"--set {_NAME}.y=N, where N divides {features}"
        raise ms.MindSpeedError([ms.Problem("MS304", text, (_NAME,), fix=ms.Fix.advise(fix))])


def _wants_whole_weight(options: dict[str, Any]) -> dict[str, bool]:
    """Ask Megatron for the weight of all ranks where it draws that, as every layout then begins with the same weights."""
    config = options["config"]
    drawn_whole = config.use_cpu_initialization and config.perform_initialization and not options.get("is_expert", False)
    return {"keep_master_weight_for_test": True} if drawn_whole else {}


def _split_weight(layer: Any, grid: Grid, axis: int, stride: int, drawn_whole: bool) -> None:
    """Give the weight of Megatron's layer the shape of this rank's block; ``axis`` is the one that Megatron splits."""
    rank, weight = layer.tp_group.rank(), layer.weight
    i, j = divmod(rank, grid.y)
    if grid.y > 1:
        weight.partition_dim = SplitAlongBothDimensions()
    if drawn_whole and layer.master_weight is not None:
        slices = layer.master_weight.chunk(grid.ranks * stride, dim=axis)
        of_row = [part for r in range(i * grid.y, (i + 1) * grid.y) for part in slices[r :: grid.ranks]]
        block = torch.cat(of_row, dim=axis).chunk(grid.y, dim=1 - axis)[j]
        weight.data = block.to(weight.device, weight.dtype).contiguous()
        layer.master_weight = None
        return
    shape = list(weight.shape)
    shape[axis] *= grid.y
    shape[1 - axis] //= grid.y
    weight.data = weight.data.reshape(shape)  # the numbers are drawn one by one, so their order is free


def _with_split_weight(state: Any, prefix: str, sharded_offsets: Any, axis: int, tp_group: Any) -> Any:
    """The sharded state of a layer with its weight in the place of this rank's block."""
    grid = _feature_and_grid(tp_group)[1]
    i, j = divmod(tp_group.rank(), grid.y)
    weight, first = state[f"{prefix}weight"], len(sharded_offsets)
    state[f"{prefix}weight"] = ShardedTensor.from_rank_offsets(
        weight.key,
        weight.data,
        *sharded_offsets,
        (first + axis, i, grid.x),
        (first + 1 - axis, j, grid.y),
        replica_id=weight.replica_id,
        prepend_axis_num=first,
    )
    return state


def with_both_axes(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around ``apply_swiglu_sharded_factory``, which makes one shard of the gate and one of the values, and supports one
    axis."""

    @wraps(original)
    def factory(tensor: Any, sharded_offsets: Any, *args: Any, **kwargs: Any) -> Any:
        first = len(sharded_offsets)
        if len(tensor.axis_fragmentations) < first + 2 or tensor.axis_fragmentations[first + 1] == 1:
            return original(tensor, sharded_offsets, *args, **kwargs)
        apart = args[0] if args else kwargs.get("singleton_local_shards", False)
        return gated_factory(tensor, tuple(sharded_offsets), bool(apart))

    return factory


def gated_factory(weight: Any, sharded_offsets: tuple[Any, ...], apart: bool) -> Any:
    """The weight of a gated MLP's first layer as the gates and the values of each rank (i, *), which lie one after another.

    With ``apart`` gates and values have keys of their own, as in Megatron.
    """
    first = len(sharded_offsets)
    (x, y), (i, j) = weight.axis_fragmentations[first:], weight.local_chunk_offset_in_global()[first:]
    ranks = x * y

    @torch.no_grad()
    def build(key: str, tensor: Tensor, replica_id: Any, flattened_range: Any) -> list[Any]:
        pieces = tensor.chunk(2 * y, dim=0)
        return [piece_of(key, part, number, replica_id) for number, part in enumerate(pieces)]

    def piece_of(key: str, part: Tensor, number: int, replica_id: Any) -> Any:
        rank, values = i * y + number // 2, number % 2
        if apart:
            key, place = f"{key}_{'wv'[values]}", (first, rank, ranks)
        else:
            place = (first, rank + values * ranks, 2 * ranks)
        offsets = (*sharded_offsets, place, (first + 1, j, y))
        return ShardedTensor.from_rank_offsets(key, part, *offsets, replica_id=replica_id, prepend_axis_num=first)

    def merge(pieces: list[Tensor]) -> Tensor:
        with torch.no_grad():
            return torch.cat(pieces)

    return ShardedTensorFactory(
        weight.key, weight.data, build, merge, weight.replica_id, flattened_range=weight.flattened_range
    )
