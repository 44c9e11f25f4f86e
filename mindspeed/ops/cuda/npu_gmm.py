"""Grouped matrix products on CUDA: programs that stay, tiles ordered by group, no copy of the group list to the host.

A group list on the CPU is checked as the reference does. One on the device is not read back: rows that no group holds keep
whatever was in the memory of the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import torch
from torch import Tensor

from mindspeed.ops.group_list import group_ranges
from mindspeed.ops.registration import Kernel
from mindspeed.ops.triton import npu_gmm as kernels
from mindspeed.ops.triton.launch import INTERPRETED, cores, launch, pieces, power, takes

_GROUPS: Final = 4096
"""Groups that a program can hold; more are left to the reference."""
_ALIGNED: Final = 16
"""Elements between the places of separate matrices are a multiple of this, so that rows are read in whole vectors."""


class TileSizes(NamedTuple):
    """Sizes of one tile of a product: result rows, result columns, and the length of one step of the sum."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


_LARGE: Final = TileSizes(128, 256, 64, 8, 3)
_MIDDLE: Final = TileSizes(128, 128, 64, 8, 3)
_FLAT: Final = TileSizes(64, 128, 64, 4, 4)
_FP32: Final = TileSizes(64, 64, 32, 4, 3)
_TINY: Final = TileSizes(16, 16, 16, 4, 1)


def tile_of(dtype: torch.dtype, rows: int, columns: int) -> TileSizes:
    """The tile for results of ``rows`` (of one group, on average) x ``columns``: one fixed choice, so results repeat."""
    if INTERPRETED:
        return _TINY
    if dtype == torch.float32:
        return _FP32
    if rows <= 64:
        return _FLAT
    return _LARGE if columns >= 2048 else _MIDDLE


def precision(dtype: torch.dtype) -> str:
    """Return the precision of fp32 products, as torch is set to."""
    return "tf32" if dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32 else "ieee"


def ends_on(device: torch.device, groups: Tensor, rows: int, cumulative: bool) -> Tensor:
    """The ends of the groups on ``device``; checked if they come from the CPU."""
    if groups.device.type == "cpu":
        group_ranges("npu_gmm", groups, rows, cumulative)
    ends = groups if cumulative else groups.cumsum(0)
    return ends.to(device, non_blocking=True).contiguous()


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, groups: Tensor, cumulative: bool) -> Tensor:
    """Each group of rows times its matrix."""
    return _by_rows(x, weight, None, bias, groups, cumulative)


def separate(x: Tensor, weights: Sequence[Tensor], groups: Tensor, cumulative: bool) -> Tensor:
    """The product with a tensor of each group; none is copied, unless one begins between two words of 16 bytes."""
    first = weights[0]
    places = tuple((weight.data_ptr() - first.data_ptr()) // first.element_size() for weight in weights)
    if any(place % _ALIGNED for place in places) or any(weight.stride() != first.stride() for weight in weights):
        return forward(x, torch.stack(list(weights)), None, groups, cumulative)
    return _by_rows(x, first[None], _on_device(places, first.device), None, groups, cumulative)


@lru_cache(maxsize=4096)
def _on_device(places: tuple[int, ...], device: torch.device) -> Tensor:
    """Copy the distances of matrices from the first one, once: parameters do not move between steps."""
    return torch.tensor(places, dtype=torch.int64, device=device)


def _by_rows(x: Tensor, weight: Tensor, places: Tensor | None, bias: Tensor | None, groups: Tensor, cumulative: bool) -> Tensor:
    (rows, depth), experts, columns = x.shape, groups.shape[0], weight.shape[2]
    ends, out = ends_on(x.device, groups, rows, cumulative), x.new_empty((rows, columns))
    if not out.numel():
        return out
    tile = tile_of(x.dtype, rows // experts, columns)
    most = (pieces(rows, tile.rows) + experts) * pieces(columns, tile.columns)
    launch(
        kernels.by_rows,
        min(most, cores(x.device)),
        *(x, weight, x if bias is None else bias.contiguous(), out, ends, ends if places is None else places),
        *(rows, experts, depth, columns, *x.stride(), *weight.stride()),
        SEPARATE=places is not None,
        BIAS=bias is not None,
        WHOLE_K=depth % tile.depth == 0,
        GROUPS=power(experts),
        PRECISION=precision(x.dtype),
        M_TILE=tile.rows,
        N_TILE=tile.columns,
        K_TILE=tile.depth,
        SWEEP=8,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


def add_products(x: Tensor, dy: Tensor, ends: Tensor, out: Tensor, add: bool) -> None:
    """``out[e] = x_e^T dy_e``, or ``+=`` with ``add``; ``out`` is contiguous, of E K N numbers."""
    (rows, tall), columns, experts = x.shape, dy.shape[1], ends.shape[0]
    if not out.numel():
        return
    if experts == 1:
        order = torch.zeros(1, dtype=torch.int64, device=x.device)
    else:
        order = torch.argsort(torch.diff(ends, prepend=ends.new_zeros(1)), descending=True)
    tile = tile_of(x.dtype, tall, columns)
    launch(
        kernels.by_groups,
        min(experts * pieces(tall, tile.rows) * pieces(columns, tile.columns), cores(x.device)),
        *(x, dy, out, ends, order, rows, experts, tall, columns, *x.stride(), *dy.stride()),
        ADD=add,
        PRECISION=precision(x.dtype),
        K_TILE=tile.rows,
        N_TILE=tile.columns,
        M_TILE=tile.depth,
        SWEEP=8,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def grouped_sum(x: Tensor, dy: Tensor, groups: Tensor, cumulative: bool) -> Tensor:
    """``x_e^T dy_e`` for each group e."""
    out = x.new_empty((groups.shape[0], x.shape[1], dy.shape[1]))
    add_products(x, dy, ends_on(x.device, groups, x.shape[0], cumulative), out, False)
    return out


def bias_sum(dy: Tensor, groups: Tensor, cumulative: bool) -> Tensor:
    """The sum of each group's rows, in fp32."""
    rows, columns = dy.shape
    ends = ends_on(dy.device, groups, rows, cumulative)
    out = dy.new_empty((groups.shape[0], columns), dtype=torch.float32)
    programs = groups.shape[0] * pieces(columns, 128)
    launch(kernels.row_sums, programs, dy, out, ends, rows, columns, *dy.stride(), ROWS=32, COLUMNS=128)
    return out


KERNELS: Final[dict[str, Kernel]] = {
    "npu_gmm": Kernel(forward, lambda x, weight, bias, *_: takes(x, bias) and weight.shape[0] <= _GROUPS),
    "npu_gmm_separate": Kernel(separate, lambda x, weights, *_: takes(x) and len(weights) <= _GROUPS),
    "npu_gmm_sum": Kernel(grouped_sum, lambda x, *_: takes(x)),
    "npu_gmm_bias": Kernel(bias_sum, lambda dy, *_: takes(dy)),
}
