"""`npu_rotary_position_embedding` on CUDA: ``x`` with any strides of its rows."""

from __future__ import annotations

from math import prod
from typing import Final, NamedTuple

import torch
from torch import Tensor

from mindspeed.ops.npu_rotary_position_embedding import INTERLEAVED
from mindspeed.ops.registration import Kernel
from mindspeed.ops.triton import npu_rotary_position_embedding as kernels
from mindspeed.ops.triton.launch import ROW, launch, pieces, power, takes, warps

_ELEMENTS: Final = 4096
"""Elements that one program turns."""


class Rows(NamedTuple):
    """The rows of ``x`` in three dimensions: their sizes, the order in which a kernel takes them, and which tables share.

    The rows of one program share a row of the tables where they can: the largest shared dimension comes last.
    """

    sizes: tuple[int, ...]
    order: tuple[int, int, int]
    shared: bool

    def strides(self, x: Tensor) -> list[int]:
        """Strides of ``x`` in the order; 0 along dimensions that it is broadcast along."""
        view = _of_four(x)
        return [0 if view.shape[dim] == 1 else view.stride(dim) for dim in self.order]


def _of_four(x: Tensor) -> Tensor:
    return x.reshape(*(1 for _ in range(4 - x.dim())), *x.shape)


def _rows(x: Tensor, table: Tensor) -> Rows:
    sizes, known = tuple(_of_four(x).shape[:3]), _of_four(table).shape
    last = max(range(3), key=lambda dim: (known[dim] == 1, sizes[dim], dim))
    first, second = (dim for dim in range(3) if dim != last)
    return Rows(sizes, (first, second, last), known[last] == 1)


def _supports(x: Tensor, *others: Tensor) -> bool:
    return takes(x, *others) and x.dim() <= 4 and x.shape[-1] <= ROW


def _side_by_side(x: Tensor) -> Tensor:
    """``x`` with the elements of a row next to one another."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _tile(width: int, along: int) -> dict[str, int]:
    pairs = power(width // 2)
    rows = min(power(along), max(_ELEMENTS // (2 * pairs), 1))
    return {"ROWS": rows, "PAIRS": pairs, "num_warps": warps(2 * rows * pairs)}


def forward(x: Tensor, cos: Tensor, sin: Tensor, mode: int, back: bool = False) -> Tensor:
    """The turned ``x``, or turned back."""
    y = x.new_empty(x.shape)
    if not x.numel():
        return y
    x, cos, sin = _side_by_side(x), cos.contiguous(), sin.contiguous()
    rows = _rows(x, cos)
    along, tile = rows.sizes[rows.order[2]], _tile(x.shape[-1], rows.sizes[rows.order[2]])
    launch(
        kernels.turn,
        prod(rows.sizes) // along * pieces(along, tile["ROWS"]),
        *(x, cos, sin, y, rows.sizes[rows.order[1]], along, x.shape[-1] // 2),
        *(*rows.strides(x), *rows.strides(y), *rows.strides(cos)),
        BACK=back,
        NEIGHBOURS=mode == INTERLEAVED,
        SHARED=rows.shared,
        **tile,
    )
    return y


def backward(dy: Tensor, cos: Tensor, sin: Tensor, mode: int) -> Tensor:
    """The gradient of ``x``: ``dy`` turned back."""
    return forward(dy, cos, sin, mode, back=True)


def _supports_tables(dy: Tensor, x: Tensor, cos: Tensor, mode: int) -> bool:
    return _supports(x, dy, cos) and x.numel() > 0 and _rows(x, cos).shared


def tables_backward(dy: Tensor, x: Tensor, cos: Tensor, mode: int) -> tuple[Tensor, Tensor]:
    """The gradients of ``cos`` and ``sin``: summed over the dimension that is last by the kernel, over others by torch."""
    rows = _rows(x, cos)
    dy, x, (first, second, last) = _side_by_side(dy), _side_by_side(x), rows.order
    shape = [*rows.sizes, x.shape[-1]]
    shape[last] = 1
    sums = [torch.empty(shape, dtype=torch.float32, device=x.device) for _ in range(2)]
    launch(
        kernels.table_gradients,
        rows.sizes[first] * rows.sizes[second],
        *(dy, x, *sums, rows.sizes[second], rows.sizes[last], x.shape[-1] // 2),
        *(*rows.strides(dy), *rows.strides(x)),
        NEIGHBOURS=mode == INTERLEAVED,
        **_tile(x.shape[-1], rows.sizes[last]),
    )
    dcos, dsin = (total.sum_to_size(_of_four(cos).shape).view(cos.shape).to(cos.dtype) for total in sums)
    return dcos, dsin


KERNELS: Final[dict[str, Kernel]] = {
    "npu_rotary_position_embedding": Kernel(forward, lambda x, cos, sin, mode: _supports(x, cos, sin)),
    "npu_rotary_position_embedding_backward": Kernel(backward, lambda dy, cos, sin, mode: _supports(dy, cos, sin)),
    "npu_rotary_position_embedding_tables_backward": Kernel(tables_backward, _supports_tables),
}
