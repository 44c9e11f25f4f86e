"""SwiGLU: with ``x = [a | b]`` along one dimension, ``y = a sigmoid(a) b``.

Computed in fp32 (fp64 for fp64 input) and rounded once to the type of ``x``. Saved for backward: ``x`` alone.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed.ops.errors import require
from mindspeed.ops.numerics import rounded, wide
from mindspeed.ops.registration import define, like


def swiglu(x: Tensor, dim: int = -1) -> Tensor:
    """Gate the second half of ``x`` along ``dim`` with SiLU of the first half.

    ``x`` is [..., 2 n, ...] of a floating-point type; the result is [..., n, ...] of the same type.
    Raises OperatorError for other shapes or types.
    """
    if not (x.is_floating_point() and -x.dim() <= dim < x.dim() and x.shape[dim] % 2 == 0):
        _refuse(x, dim)
    y: Tensor = _SWIGLU(x, dim)
    return y


def _refuse(x: Tensor, dim: int) -> None:
    """Say which check failed."""
    require(x.is_floating_point(), "swiglu", f"x is {x.dtype}, but must have a floating-point type")
    require(-x.dim() <= dim < x.dim(), "swiglu", f"x of shape {tuple(x.shape)} has no dimension {dim}")
    require(False, "swiglu", f"dimension {dim} of x has size {x.shape[dim]}, which cannot be split into halves")


def _halves(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    a, b = wide(x).chunk(2, dim)
    return a, b


def _forward(x: Tensor, dim: int) -> Tensor:
    a, b = _halves(x, dim)
    return rounded(F.silu(a) * b, x.dtype)


def _backward(dy: Tensor, x: Tensor, dim: int) -> Tensor:
    """Reference: ``da = dy b s (1 + a (1 - s))`` and ``db = dy a s`` with ``s = sigmoid(a)``."""
    a, b = _halves(x, dim)
    dy_wide = dy.to(a.dtype)
    s = torch.sigmoid(a)
    return rounded(torch.cat((dy_wide * b * s * (1 + a * (1 - s)), dy_wide * a * s), dim), x.dtype)


def _forward_shape(x: Tensor, dim: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] //= 2
    return x.new_empty(shape)


def _save(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
    x, ctx.dim = inputs
    ctx.save_for_backward(x)


def _gradient(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
    (x,) = ctx.saved_tensors
    return torch.ops.mindspeed.swiglu_backward(dy, x, ctx.dim), None


define("swiglu(Tensor x, int dim) -> Tensor", _forward, _forward_shape, _save, _gradient)
define("swiglu_backward(Tensor dy, Tensor x, int dim) -> Tensor", _backward, like(1))
_SWIGLU: Final = torch.ops.mindspeed.swiglu.default
