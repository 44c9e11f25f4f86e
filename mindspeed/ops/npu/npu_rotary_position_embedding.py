"""`npu_rotary_position_embedding` by ``npu_rotary_mul``, the gradients of its tables by ``npu_rotary_mul_backward``.

The gradient of x is a rotation too, ``dx = dy cos - rot(dy) s`` with s the sines of a pair exchanged: one more
``npu_rotary_mul``, for which x need not be kept. Operands of several types are widened before and rounded after.
The tables are broadcast along the dimensions that torch_npu documents; others, and fp64, run the reference.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from mindspeed.ops.npu import TYPES
from mindspeed.ops.npu_rotary_position_embedding import HALF
from mindspeed.ops.numerics import filled, rounded, unflatten
from mindspeed.ops.registration import Kernel

_MODES: Final = ("half", "interleave")
_HALF_BROADCASTS: Final = ((), (1,), (2,), (0, 1), (0, 2), (1, 2))
_NEIGHBOUR_BROADCASTS: Final = ((0, 1), (0, 2), (1, 2))
_WIDTH, _BATCH_OR_HEADS, _SUMMED = 896, 1000, 1024


def _supports(x: Tensor, cos: Tensor, mode: int) -> bool:
    """Return whether torch_npu documents x of 4 dimensions with tables broadcast like these."""
    types = x.dtype in TYPES and cos.dtype in TYPES
    if not types or x.dim() != 4 or x.shape[-1] >= _WIDTH or not filled(x):
        return False
    allowed = _HALF_BROADCASTS if mode == HALF else _NEIGHBOUR_BROADCASTS
    return any(_broadcasts(x, cos, dims, mode) for dims in allowed)


def _broadcasts(x: Tensor, cos: Tensor, dims: tuple[int, ...], mode: int) -> bool:
    """Return whether the tables repeat along exactly ``dims`` of the first three."""
    shape = [1 if i in dims else size for i, size in enumerate(x.shape[:3])]
    repeated = [x.shape[i] for i in dims]
    few = all(size < _BATCH_OR_HEADS for size in repeated)
    few = few and (mode == HALF or repeated[0] * repeated[1] < _BATCH_OR_HEADS)
    return list(cos.shape[:3]) == shape and few


def forward(x: Tensor, cos: Tensor, sin: Tensor, mode: int) -> Tensor:
    common = torch.promote_types(x.dtype, cos.dtype)
    y = torch.ops.npu.npu_rotary_mul(x.to(common), cos.to(common), sin.to(common), rotary_mode=_MODES[mode])
    return rounded(y, x.dtype)


def _exchanged(sin: Tensor, mode: int) -> Tensor:
    """``sin`` with the two numbers of each pair in each other's place."""
    if mode == HALF:
        return sin.roll(sin.shape[-1] // 2, -1)
    return unflatten(sin, -1, (-1, 2)).flip(-1).flatten(-2)


def backward(dy: Tensor, cos: Tensor, sin: Tensor, mode: int) -> Tensor:
    return forward(dy, cos, -_exchanged(sin, mode), mode)


def _supports_tables(dy: Tensor, x: Tensor, cos: Tensor, mode: int) -> bool:
    return _supports(x, cos, mode) and dy.dtype == x.dtype and x.numel() // max(cos.numel(), 1) <= _SUMMED


def tables_backward(dy: Tensor, x: Tensor, cos: Tensor, mode: int) -> tuple[Tensor, Tensor]:
    common = torch.promote_types(x.dtype, cos.dtype)
    table = cos.to(common)
    # the gradients of the tables do not depend on their values: the cosines stand in for the sines
    _, dcos, dsin = torch.ops.npu.npu_rotary_mul_backward(dy.to(common), x.to(common), table, table, rotary_mode=_MODES[mode])
    return rounded(dcos, cos.dtype), rounded(dsin, cos.dtype)


KERNELS: Final[dict[str, Kernel]] = {
    "npu_rotary_position_embedding": Kernel(forward, lambda x, cos, sin, mode: _supports(x, cos, mode)),
    "npu_rotary_position_embedding_backward": Kernel(backward, lambda dy, cos, sin, mode: _supports(dy, cos, mode)),
    "npu_rotary_position_embedding_tables_backward": Kernel(tables_backward, _supports_tables),
}
