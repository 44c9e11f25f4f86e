"""Rotary position embedding: ``y = x cos + rot(x) sin`` with ``rot`` a quarter turn of pairs of the last dimension.

Mode 0 pairs element i with element i + D/2 (``rot(x) = [-x2 | x1]`` of the halves), mode 1 neighbours
(``(x0, x1) -> (-x1, x0)``). Computed in fp32 (fp64 for fp64 input) and rounded once. Saved for backward: ``cos`` and
``sin``; ``x`` only if they need gradients.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from mindspeed.ops.autocast import in_widest_type
from mindspeed.ops.errors import require
from mindspeed.ops.numerics import rounded, wide
from mindspeed.ops.registration import define, like

HALF: Final = 0
INTERLEAVED: Final = 1


@in_widest_type("cos", "sin")
def npu_rotary_position_embedding(x: Tensor, cos: Tensor, sin: Tensor, mode: int = HALF) -> Tensor:
    """Rotate pairs of the last dimension of ``x`` by the angles whose cosines and sines are given.

    ``x`` is [..., D] with D even (BNSD, BSND, SBND or another layout); ``cos`` and ``sin`` have one shape, of as many
    dimensions, each 1 or that of ``x``, the last one D. The result is like ``x``. Raises OperatorError for other shapes,
    types or modes.
    """
    if not _fits(x, cos, sin, mode):
        _refuse(x, cos, sin, mode)
    y: Tensor = _ROTATE(x, cos, sin, mode)
    return y


def _fits(x: Tensor, cos: Tensor, sin: Tensor, mode: int) -> bool:
    """All checks at once: what a call that is right pays for."""
    shape, table = x.shape, cos.shape
    return (
        mode in (HALF, INTERLEAVED)
        and x.is_floating_point()
        and cos.is_floating_point()
        and cos.dtype == sin.dtype
        and table == sin.shape
        and 0 < len(shape) == len(table)
        and shape[-1] % 2 == 0
        and table[-1] == shape[-1]
        and all(one == size or one == 1 for one, size in zip(table, shape, strict=True))
    )


def _refuse(x: Tensor, cos: Tensor, sin: Tensor, mode: int) -> None:
    """Say which check failed."""
    op = "npu_rotary_position_embedding"
    require(x.is_floating_point(), op, f"x is {x.dtype}, but must have a floating-point type")
    same = cos.dtype == sin.dtype and cos.is_floating_point()
    require(same, op, f"cos is {cos.dtype} and sin is {sin.dtype}, but they must have one floating-point type")
    require(mode in (HALF, INTERLEAVED), op, f"mode is {mode}, but must be 0 (halves) or 1 (neighbours)")
    require(x.dim() > 0 and x.shape[-1] % 2 == 0, op, f"x of shape {tuple(x.shape)} needs an even last dimension")
    require(cos.shape == sin.shape, op, f"cos has shape {tuple(cos.shape)} and sin {tuple(sin.shape)}, but they must be equal")
    require(False, op, f"cos of shape {tuple(cos.shape)} does not broadcast to x of shape {tuple(x.shape)}")


def _quarter_turn(x: Tensor, mode: int) -> Tensor:
    if mode == HALF:
        first, second = x.chunk(2, -1)
        return torch.cat((-second, first), -1)
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack((-odd, even), -1).flatten(-2)


def _forward(x: Tensor, cos: Tensor, sin: Tensor, mode: int) -> Tensor:
    x_wide = wide(x)
    return rounded(x_wide * wide(cos) + _quarter_turn(x_wide, mode) * wide(sin), x.dtype)


def _backward(dy: Tensor, cos: Tensor, sin: Tensor, mode: int) -> Tensor:
    """Reference: ``dx = dy cos - rot(dy sin)``, the transpose of a quarter turn being its opposite."""
    dy_wide = wide(dy)
    return rounded(dy_wide * wide(cos) - _quarter_turn(dy_wide * wide(sin), mode), dy.dtype)


def _tables_backward(dy: Tensor, x: Tensor, cos: Tensor, mode: int) -> tuple[Tensor, Tensor]:
    """Reference: ``dcos = sum(dy x)`` and ``dsin = sum(dy rot(x))`` over the dimensions that ``cos`` is broadcast along."""
    dy_wide, x_wide = wide(dy), wide(x)
    dcos = (dy_wide * x_wide).sum_to_size(cos.shape)
    dsin = (dy_wide * _quarter_turn(x_wide, mode)).sum_to_size(cos.shape)
    return rounded(dcos, cos.dtype), rounded(dsin, cos.dtype)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, int], output: Tensor) -> None:
    x, cos, sin, ctx.mode = inputs
    ctx.of_tables = any(ctx.needs_input_grad[1:3])
    ctx.save_for_backward(cos, sin, *([x] if ctx.of_tables else []))


def _gradient(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
    cos, sin, *x = ctx.saved_tensors
    dx = torch.ops.mindspeed.npu_rotary_position_embedding_backward(dy, cos, sin, ctx.mode)
    dcos = dsin = None
    if ctx.of_tables:
        dcos, dsin = torch.ops.mindspeed.npu_rotary_position_embedding_tables_backward(dy, *x, cos, ctx.mode)
    return dx, dcos, dsin, None


define(
    "npu_rotary_position_embedding(Tensor x, Tensor cos, Tensor sin, int mode) -> Tensor",
    _forward,
    like(0),
    _save,
    _gradient,
)
define("npu_rotary_position_embedding_backward(Tensor dy, Tensor cos, Tensor sin, int mode) -> Tensor", _backward, like(0))
define(
    "npu_rotary_position_embedding_tables_backward(Tensor dy, Tensor x, Tensor cos, int mode) -> (Tensor, Tensor)",
    _tables_backward,
    like(2, 2),
)
_ROTATE: Final = torch.ops.mindspeed.npu_rotary_position_embedding.default
