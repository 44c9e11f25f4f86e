"""RMSNorm: ``y = x / sqrt(mean(x^2) + epsilon) * gamma`` over the trailing dimensions that gamma has.

All sums are taken in fp32 (fp64 for fp64 input) and the result is rounded once to the type of ``x``.
Saved for backward: ``x``, ``gamma`` and one reciprocal root per row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mindspeed.ops.errors import require
from mindspeed.ops.library import define
from mindspeed.ops.numerics import wide, wide_type


def rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> Tensor:
    """Normalize ``x`` by its root mean square and scale it by ``gamma``.

    ``x`` is [*rows, *norm], ``gamma`` [*norm], both of one floating-point type; the result is like ``x``.
    Raises OperatorError for other shapes or types.
    """
    require(x.is_floating_point(), "rms_norm", f"x is {x.dtype}, not a floating-point type")
    require(x.dtype == gamma.dtype, "rms_norm", f"x is {x.dtype} and gamma is {gamma.dtype}; they must have one type")
    fits = 0 < gamma.dim() <= x.dim() and x.shape[-gamma.dim() :] == gamma.shape
    require(fits, "rms_norm", f"gamma has shape {tuple(gamma.shape)}, which does not end x of shape {tuple(x.shape)}")
    y: Tensor = torch.ops.mindspeed.rms_norm(x, gamma, epsilon)[0]
    return y


def _norm_dims(gamma: Tensor) -> list[int]:
    return list(range(-gamma.dim(), 0))


def _forward(x: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Reference: ``(y, rstd)``; ``rstd`` has 1 in the dimensions of gamma."""
    x_wide = wide(x)
    rstd = torch.rsqrt(x_wide.square().mean(_norm_dims(gamma), keepdim=True) + epsilon)
    return (x_wide * rstd * wide(gamma)).to(x.dtype), rstd


def _backward(dy: Tensor, x: Tensor, gamma: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Reference: ``dx = r (g - n mean(g n))`` with ``g = gamma dy`` and ``n = x r``; ``dgamma = sum(dy n)`` over the rows."""
    dy_wide = wide(dy)
    normalized = wide(x) * rstd
    g = dy_wide * wide(gamma)
    dx = rstd * (g - normalized * (g * normalized).mean(_norm_dims(gamma), keepdim=True))
    dgamma = (dy_wide * normalized).sum_to_size(gamma.shape)
    return dx.to(x.dtype), dgamma.to(gamma.dtype)


def _forward_shapes(x: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    rows = x.shape[: x.dim() - gamma.dim()]
    rstd = x.new_empty((*rows, *(1 for _ in gamma.shape)), dtype=wide_type(x.dtype))
    return torch.empty_like(x), rstd


def _backward_shapes(dy: Tensor, x: Tensor, gamma: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(gamma)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: tuple[Tensor, Tensor]) -> None:
    x, gamma, _ = inputs
    _, rstd = output
    ctx.mark_non_differentiable(rstd)
    ctx.save_for_backward(x, gamma, rstd)


def _gradient(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None]:
    x, gamma, rstd = ctx.saved_tensors
    dx, dgamma = torch.ops.mindspeed.rms_norm_backward(dy, x, gamma, rstd)
    return dx, dgamma, None


define("rms_norm(Tensor x, Tensor gamma, float epsilon) -> (Tensor, Tensor)", _forward, _forward_shapes, _save, _gradient)
define("rms_norm_backward(Tensor dy, Tensor x, Tensor gamma, Tensor rstd) -> (Tensor, Tensor)", _backward, _backward_shapes)
