"""`npu_rotary_position_embedding` on CUDA: ``x`` with any strides of its rows. Gradients of the tables run the reference."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, Final

from torch import Tensor

from mindspeed.ops.npu_rotary_position_embedding import INTERLEAVED, _backward, _forward
from mindspeed.ops.triton import npu_rotary_position_embedding as kernels
from mindspeed.ops.triton.launch import ROW, launch, pieces, power, takes, warps

_ELEMENTS: Final = 4096
"""Elements that one program turns."""


def _takes(x: Tensor, cos: Tensor, sin: Tensor) -> bool:
    return takes(x, cos, sin) and x.dim() <= 4 and x.shape[-1] <= ROW


def _turn(x: Tensor, cos: Tensor, sin: Tensor, mode: int, back: bool) -> Tensor:
    y = x.new_empty(x.shape)
    if not x.numel():
        return y
    x = x if x.stride(-1) == 1 else x.contiguous()
    views = [t.reshape(*(1 for _ in range(4 - t.dim())), *t.shape) for t in (x, y, cos.contiguous())]
    sizes = views[0].shape[:3]
    strides = [view.stride()[:3] for view in views]
    strides[2] = tuple(0 if size == 1 else step for size, step in zip(views[2].shape[:3], strides[2], strict=True))
    # the rows of one program share a row of the tables where they can: the largest shared dimension comes last
    last = max(range(3), key=lambda dim: (strides[2][dim] == 0, sizes[dim], dim))
    order = [*(dim for dim in range(3) if dim != last), last]
    steps = [step[dim] for step in strides for dim in order]
    half, pairs, along = x.shape[-1] // 2, power(x.shape[-1] // 2), sizes[last]
    rows = min(power(along), max(_ELEMENTS // (2 * pairs), 1))
    launch(
        kernels.turn,
        prod(sizes) // along * pieces(along, rows),
        x.device,
        *(x, cos.contiguous(), sin.contiguous(), y),
        *(sizes[order[1]], along, half, *steps),
        BACK=back,
        NEIGHBOURS=mode == INTERLEAVED,
        SHARED=strides[2][last] == 0,
        ROWS=rows,
        PAIRS=pairs,
        num_warps=warps(2 * rows * pairs),
    )
    return y


def forward(x: Tensor, cos: Tensor, sin: Tensor, mode: int) -> Tensor:
    """The turned ``x``."""
    return _turn(x, cos, sin, mode, False) if _takes(x, cos, sin) else _forward(x, cos, sin, mode)


def backward(dy: Tensor, cos: Tensor, sin: Tensor, mode: int) -> Tensor:
    """The gradient of ``x``: ``dy`` turned back."""
    return _turn(dy, cos, sin, mode, True) if _takes(dy, cos, sin) else _backward(dy, cos, sin, mode)


KERNELS: Final[dict[str, Callable[..., Any]]] = {
    "npu_rotary_position_embedding": forward,
    "npu_rotary_position_embedding_backward": backward,
}
