"""The process groups of two-dimensional tensor parallelism."""

from __future__ import annotations

import torch.distributed as dist

from mindspeed.features.tensor_parallel_2d.products import Grid


def make_grid(tp_group: dist.ProcessGroup, y: int) -> Grid:
    """Split a tensor-parallel group into rows of ``y`` neighbours; every rank of it calls this."""
    ranks, mine = dist.get_process_group_ranks(tp_group), tp_group.rank()
    first = mine // y * y
    x_group = dist.new_group(ranks[mine % y :: y], use_local_synchronization=True, group_desc="TENSOR_PARALLEL_X_GROUP")
    y_group = dist.new_group(ranks[first : first + y], use_local_synchronization=True, group_desc="TENSOR_PARALLEL_Y_GROUP")
    return Grid(x_group, y_group)


def destroy_grid(grid: Grid) -> None:
    """Destroy both groups, before Megatron destroys its groups."""
    dist.destroy_process_group(grid.x_group)
    dist.destroy_process_group(grid.y_group)
