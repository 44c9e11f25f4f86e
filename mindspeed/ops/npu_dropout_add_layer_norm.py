"""Dropout, residual and normalization in one: ``z = drop(x0 rowscale layerscale) + residual`` and a norm of z.

The norm is LayerNorm (biased variance, epsilon inside the root, weight, bias) or RMSNorm (weight only). Everything between
the inputs and the two results is computed in fp32 (fp64 for fp64 input); each result is rounded once.
Saved for backward: z as it was returned, the mask of one byte per element, two numbers per row, the small inputs,
and ``x0`` only if a scale needs a gradient.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mindspeed.ops.autocast import in_widest_type
from mindspeed.ops.errors import require
from mindspeed.ops.numerics import rounded, wide, wide_type
from mindspeed.ops.registration import define


class NormInputs(NamedTuple):
    """The arguments of the operator, in the order of the schema."""

    x0: Tensor
    residual: Tensor | None
    weight: Tensor
    bias: Tensor | None
    rowscale: Tensor | None
    layerscale: Tensor | None
    mask: Tensor | None
    p: float
    epsilon: float
    residual_dtype: torch.dtype
    rms: bool


class NormGradientInputs(NamedTuple):
    """The arguments of the operator's gradient, in the order of the schema."""

    dout: Tensor
    dz: Tensor
    z: Tensor
    weight: Tensor
    mean: Tensor
    rstd: Tensor
    x0: Tensor | None
    rowscale: Tensor | None
    layerscale: Tensor | None
    mask: Tensor | None
    p: float
    rms: bool


@in_widest_type("x0", "weight", "bias", "rowscale", "layerscale")
def npu_dropout_add_layer_norm(
    x0: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    dropout_p: float,
    epsilon: float,
    rowscale: Tensor | None = None,
    layerscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    return_dropout_mask: bool = False,
) -> Any:
    """LayerNorm of ``drop(x0 rowscale layerscale) + residual``.

    ``x0`` and ``residual`` are [..., H], ``weight``, ``bias`` and ``layerscale`` [H], ``rowscale`` [...]. Gives the result
    in the type of ``x0``; with ``prenorm`` also z, in the type of the residual (without one: fp32 if ``residual_in_fp32``,
    else that of ``x0``); with ``return_dropout_mask`` also the mask, uint8, 1 where an element was kept.
    The mask is drawn from torch's generator of the device. Raises OperatorError for other shapes or types.
    """
    inputs = NormInputs(x0, residual, weight, bias, rowscale, layerscale, None, dropout_p, epsilon, x0.dtype, False)
    return _checked("npu_dropout_add_layer_norm", inputs, residual_in_fp32, prenorm, return_dropout_mask)


@in_widest_type("x0", "weight", "bias", "rowscale", "layerscale")
def npu_dropout_add_rms_norm(
    x0: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    dropout_p: float,
    epsilon: float,
    rowscale: Tensor | None = None,
    layerscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    return_dropout_mask: bool = False,
) -> Any:
    """RMSNorm in place of LayerNorm, without mean and bias; else as `npu_dropout_add_layer_norm`."""
    require(bias is None, "npu_dropout_add_rms_norm", "a bias is given, but RMSNorm has no bias")
    inputs = NormInputs(x0, residual, weight, None, rowscale, layerscale, None, dropout_p, epsilon, x0.dtype, True)
    return _checked("npu_dropout_add_rms_norm", inputs, residual_in_fp32, prenorm, return_dropout_mask)


def _checked(op: str, inputs: NormInputs, residual_in_fp32: bool, prenorm: bool, with_mask: bool) -> Any:
    """Refuse what does not fit, draw the mask, and give those of the results that were requested."""
    x0, residual, weight, bias, rowscale, layerscale, _, p, *_ = inputs
    require(
        x0.is_floating_point() and x0.dim() > 0,
        op,
        f"x0 is {x0.dtype} of shape {tuple(x0.shape)}, but must be a floating-point matrix",
    )
    require(0 <= p <= 1, op, f"dropout_p is {p}, but must be between 0 and 1")
    rows, norm = x0.shape[:-1], x0.shape[-1:]
    shapes = {"residual": (residual, x0.shape), "weight": (weight, norm), "bias": (bias, norm)}
    shapes |= {"rowscale": (rowscale, rows), "layerscale": (layerscale, norm)}
    for name, (tensor, shape) in shapes.items():
        fits = tensor is None or (tensor.shape == shape and tensor.is_floating_point())
        require(fits, op, f"{name} must have a floating-point type and shape {tuple(shape)}, to match x0")
    mixed = {x0.dtype, weight.dtype} == {torch.bfloat16, torch.float16}
    require(not mixed, op, f"x0 is {x0.dtype} and weight is {weight.dtype}, but two different 16-bit types are not supported")
    dtype = residual.dtype if residual is not None else wide_type(x0.dtype) if residual_in_fp32 else x0.dtype
    mask = torch.empty(x0.shape, dtype=torch.uint8, device=x0.device).bernoulli_(1 - p) if p > 0 else None
    out, z, *_ = torch.ops.mindspeed.npu_dropout_add_layer_norm(*inputs._replace(mask=mask, residual_dtype=dtype))
    selected: tuple[Tensor, ...] = (out,)
    if prenorm:
        selected += (z,)
    if with_mask:
        selected += (torch.ones_like(x0, dtype=torch.uint8) if mask is None else mask,)
    return selected if len(selected) > 1 else out


def _kept(p: float) -> float:
    return 1 / (1 - p) if p < 1 else 0.0


def _product(x: Tensor, *factors: Tensor | None) -> Tensor:
    for factor in factors:
        x = x if factor is None else x * factor
    return x


def _scales(
    rowscale: Tensor | None, layerscale: Tensor | None, mask: Tensor | None, p: float
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The three factors of ``x0`` in a wide type, each broadcasting over it."""
    return (
        None if rowscale is None else wide(rowscale)[..., None],
        None if layerscale is None else wide(layerscale),
        None if mask is None else mask * _kept(p),
    )


def _forward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Reference: ``(out, z, mean, rstd)``, the last two with 1 in the place of H."""
    x0, residual, weight, bias, rowscale, layerscale, mask, p, epsilon, residual_dtype, rms = NormInputs(*args)
    z = _product(wide(x0), *_scales(rowscale, layerscale, mask, p))
    if residual is not None:
        z = z + wide(residual)
    mean = torch.zeros_like(z[..., :1]) if rms else z.mean(-1, keepdim=True)
    rstd = torch.rsqrt((z - mean).square().mean(-1, keepdim=True) + epsilon)
    out = (z - mean) * rstd * wide(weight)
    if bias is not None:
        out = out + wide(bias)
    z = z.to(residual_dtype, copy=True).contiguous()
    return rounded(out, x0.dtype), z, mean.contiguous(), rstd.contiguous()


def _backward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Reference: gradients of x0, residual, weight, bias, rowscale, layerscale; those of scales are empty without ``x0``."""
    inputs = NormGradientInputs(*args)
    dout, dz, z, weight, mean, rstd, *_, rms = inputs
    normalized, dout_wide = (wide(z) - mean) * rstd, wide(dout)
    g = dout_wide * wide(weight)
    centred = g if rms else g - g.mean(-1, keepdim=True)
    dz_wide = wide(dz) + rstd * (centred - normalized * (g * normalized).mean(-1, keepdim=True))
    dweight = (dout_wide * normalized).sum_to_size(weight.shape).to(weight.dtype)
    dbias = dout_wide.sum_to_size(weight.shape).to(weight.dtype)
    dx0, dresidual, drow, dlayer = _input_gradients(dz_wide, inputs)
    return dx0, dresidual, dweight, dbias, drow, dlayer


def _input_gradients(dz: Tensor, inputs: NormGradientInputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x0, residual, rowscale and layerscale from that of z in a wide type."""
    dout, _, z, _, _, _, x0, rowscale, layerscale, mask, p, _ = inputs
    rows, layers, kept = _scales(rowscale, layerscale, mask, p)
    drow, dlayer = dout.new_empty(0), dout.new_empty(0)
    if x0 is not None:
        plain = _product(wide(x0) * dz, kept)
        drow = drow if rowscale is None else _product(plain, layers).sum(-1).to(rowscale.dtype)
        dlayer = dlayer if layerscale is None else _product(plain, rows).sum_to_size(layerscale.shape).to(layerscale.dtype)
    # a result may not be an input: a copy where nothing changes the value
    dx0 = _product(dz, rows, layers, kept).to(dout.dtype, copy=True).contiguous()
    return dx0, dz.to(z.dtype, copy=True).contiguous(), drow.contiguous(), dlayer


def _forward_shapes(x0: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    row = x0.new_empty((*x0.shape[:-1], 1), dtype=wide_type(x0.dtype))
    return x0.new_empty(x0.shape), x0.new_empty(x0.shape, dtype=rest[8]), row, row.new_empty(row.shape)


def _backward_shapes(
    dout: Tensor, dz: Tensor, z: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, x0: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    rowscale, layerscale = (scale if x0 is not None and scale is not None else dout.new_empty(0) for scale in rest[:2])
    like = (dout, z, weight, weight, rowscale, layerscale)
    dx0, dresidual, dweight, dbias, drow, dlayer = (tensor.new_empty(tensor.shape) for tensor in like)
    return dx0, dresidual, dweight, dbias, drow, dlayer


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    x0, _, weight, bias, rowscale, layerscale, mask, ctx.p, _, _, ctx.rms = inputs
    _, z, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.bias_dtype = None if bias is None else bias.dtype
    of_scales = any(ctx.needs_input_grad[4:6])
    ctx.save_for_backward(z, weight, mean, rstd, x0 if of_scales else None, rowscale, layerscale, mask)


def _gradient(ctx: Any, dout: Tensor, dz: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    grads = torch.ops.mindspeed.npu_dropout_add_layer_norm_backward(dout, dz, *ctx.saved_tensors, ctx.p, ctx.rms)
    wanted = [grad if needed else None for grad, needed in zip(grads, ctx.needs_input_grad, strict=False)]
    if wanted[3] is not None:
        wanted[3] = wanted[3].to(ctx.bias_dtype)
    return (*wanted, None, None, None, None, None)


define(
    "npu_dropout_add_layer_norm(Tensor x0, Tensor? residual, Tensor weight, Tensor? bias, Tensor? rowscale, "
    "Tensor? layerscale, Tensor? mask, float p, float epsilon, ScalarType residual_dtype, bool rms) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _forward_shapes,
    _save,
    _gradient,
)
define(
    "npu_dropout_add_layer_norm_backward(Tensor dout, Tensor dz, Tensor z, Tensor weight, Tensor mean, Tensor rstd, "
    "Tensor? x0, Tensor? rowscale, Tensor? layerscale, Tensor? mask, float p, bool rms) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _backward_shapes,
)
