"""RMSNorm: ``y = x / sqrt(mean(x^2) + epsilon) * gamma`` over the trailing dimensions that gamma has; alone or of a sum.

All sums are taken in fp32 (fp64 for fp64 input) and each result is rounded once to the type of ``x``.
Saved for backward: ``x`` (or the sum, as it was returned), ``gamma`` and one reciprocal root per row.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from mindspeed.ops.autocast import in_widest_type
from mindspeed.ops.errors import require
from mindspeed.ops.numerics import rounded, wide, wide_type
from mindspeed.ops.registration import define, like


@in_widest_type("x", "gamma")
def rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> Tensor:
    """Normalize ``x`` by its root mean square and scale it by ``gamma``.

    ``x`` is [*rows, *norm], ``gamma`` [*norm], both of one floating-point type; the result is like ``x``.
    Raises OperatorError for other shapes or types.
    """
    if not _fits(x, gamma):
        _refuse("rms_norm", x, gamma)
    y: Tensor = _RMS_NORM(x, gamma, epsilon)[0]
    return y


@in_widest_type("x", "residual", "gamma")
def rms_norm_residual(x: Tensor, residual: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """``(y, sum)``: ``sum = x + residual`` and ``y`` its RMSNorm, in one pass.

    ``x`` and ``residual`` are [*rows, *norm], ``gamma`` [*norm], all of one floating-point type; both results are like
    ``x``. The norm sees the sum before it is rounded. Raises OperatorError for other shapes or types.
    """
    if not (_fits(x, gamma) and residual.dtype == x.dtype and residual.shape == x.shape):
        _refuse("rms_norm_residual", x, gamma)
        sentence = f"residual is {residual.dtype} of shape {tuple(residual.shape)}, but x is {x.dtype} of {tuple(x.shape)}"
        require(False, "rms_norm_residual", f"{sentence}; they must be equal")
    y, total, _ = _RMS_NORM_RESIDUAL(x, residual, gamma, epsilon)
    return y, total


def _fits(x: Tensor, gamma: Tensor) -> bool:
    """All checks at once: what a call that is right pays for."""
    dims = gamma.dim()
    return x.dtype == gamma.dtype and x.is_floating_point() and 0 < dims <= x.dim() and x.shape[-dims:] == gamma.shape


def _refuse(op: str, x: Tensor, gamma: Tensor) -> None:
    """Say which check failed."""
    require(x.is_floating_point(), op, f"x is {x.dtype}, but must have a floating-point type")
    require(x.dtype == gamma.dtype, op, f"x is {x.dtype} and gamma is {gamma.dtype}, but they must have one type")
    fits = 0 < gamma.dim() <= x.dim() and x.shape[-gamma.dim() :] == gamma.shape
    require(fits, op, f"gamma has shape {tuple(gamma.shape)}, which does not match the last dimensions of x, {tuple(x.shape)}")


def _norm_dims(gamma: Tensor) -> list[int]:
    return list(range(-gamma.dim(), 0))


def _forward(x: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Reference: ``(y, rstd)``; ``rstd`` has 1 in the dimensions of gamma."""
    x_wide = wide(x)
    rstd = torch.rsqrt(x_wide.square().mean(_norm_dims(gamma), keepdim=True) + epsilon)
    return rounded(x_wide * rstd * wide(gamma), x.dtype), rstd.contiguous()


def _wide_gradients(dy: Tensor, x: Tensor, gamma: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """``dx = r (g - n mean(g n))`` with ``g = gamma dy`` and ``n = x r``; ``dgamma = sum(dy n)`` over the rows."""
    dy_wide = wide(dy)
    normalized = wide(x) * rstd
    g = dy_wide * wide(gamma)
    dx = rstd * (g - normalized * (g * normalized).mean(_norm_dims(gamma), keepdim=True))
    return dx, (dy_wide * normalized).sum_to_size(gamma.shape)


def _backward(dy: Tensor, x: Tensor, gamma: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Reference: the gradients of x and gamma."""
    dx, dgamma = _wide_gradients(dy, x, gamma, rstd)
    return rounded(dx, x.dtype), rounded(dgamma, gamma.dtype)


def _residual_forward(x: Tensor, residual: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    """Reference: ``(y, sum, rstd)``."""
    total = wide(x) + wide(residual)
    rstd = torch.rsqrt(total.square().mean(_norm_dims(gamma), keepdim=True) + epsilon)
    return rounded(total * rstd * wide(gamma), x.dtype), rounded(total, x.dtype), rstd.contiguous()


def _residual_backward(dy: Tensor, dsum: Tensor, total: Tensor, gamma: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Reference: the gradient of x, which is also that of the residual, and the gradient of gamma."""
    dx, dgamma = _wide_gradients(dy, total, gamma, rstd)
    return rounded(wide(dsum) + dx, total.dtype), rounded(dgamma, gamma.dtype)


def _rstd_shape(x: Tensor, gamma: Tensor) -> Tensor:
    rows = x.shape[: x.dim() - gamma.dim()]
    return x.new_empty((*rows, *(1 for _ in gamma.shape)), dtype=wide_type(x.dtype))


def _forward_shapes(x: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), _rstd_shape(x, gamma)


def _residual_forward_shapes(x: Tensor, residual: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape), _rstd_shape(x, gamma)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: tuple[Tensor, Tensor]) -> None:
    x, gamma, _ = inputs
    _, rstd = output
    ctx.mark_non_differentiable(rstd)
    ctx.save_for_backward(x, gamma, rstd)


def _gradient(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None]:
    x, gamma, rstd = ctx.saved_tensors
    dx, dgamma = torch.ops.mindspeed.rms_norm_backward(dy, x, gamma, rstd)
    return dx, dgamma, None


def _residual_save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, float], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, total, rstd = output
    ctx.mark_non_differentiable(rstd)
    ctx.save_for_backward(total, inputs[2], rstd)


def _residual_gradient(ctx: Any, dy: Tensor, dsum: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
    dx, dgamma = torch.ops.mindspeed.rms_norm_residual_backward(dy, dsum, *ctx.saved_tensors)
    return dx, dx, dgamma, None


define("rms_norm(Tensor x, Tensor gamma, float epsilon) -> (Tensor, Tensor)", _forward, _forward_shapes, _save, _gradient)
define("rms_norm_backward(Tensor dy, Tensor x, Tensor gamma, Tensor rstd) -> (Tensor, Tensor)", _backward, like(1, 2))
define(
    "rms_norm_residual(Tensor x, Tensor residual, Tensor gamma, float epsilon) -> (Tensor, Tensor, Tensor)",
    _residual_forward,
    _residual_forward_shapes,
    _residual_save,
    _residual_gradient,
)
define(
    "rms_norm_residual_backward(Tensor dy, Tensor dsum, Tensor sum, Tensor gamma, Tensor rstd) -> (Tensor, Tensor)",
    _residual_backward,
    like(2, 3),
)
_RMS_NORM: Final = torch.ops.mindspeed.rms_norm.default
_RMS_NORM_RESIDUAL: Final = torch.ops.mindspeed.rms_norm_residual.default
