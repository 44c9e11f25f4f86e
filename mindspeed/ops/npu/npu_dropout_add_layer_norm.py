"""`npu_dropout_add_layer_norm` around ``npu_add_layer_norm``, ``npu_add_rms_norm``, ``npu_rms_norm`` and its backward.

Scales and the drawn mask are multiplied in fp32 by torch; sum and norm are then one operator. Without a residual, and in the
gradient of LayerNorm, the norm is torch's own. fp64 and a single row without a dimension of its own run the reference.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from mindspeed.ops.npu import TYPES
from mindspeed.ops.npu_dropout_add_layer_norm import NormGradientInputs, NormInputs, _input_gradients, _product, _scales
from mindspeed.ops.numerics import filled, rounded, wide
from mindspeed.ops.registration import Kernel


def _supports(x: Tensor, *others: Tensor | None) -> bool:
    types = all(other is None or other.dtype in TYPES for other in (x, *others))
    return types and 1 < x.dim() <= 8 and filled(x)


def forward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x0, residual, weight, bias, rowscale, layerscale, mask, p, epsilon, residual_dtype, rms = NormInputs(*args)
    z = _product(wide(x0), *_scales(rowscale, layerscale, mask, p))
    gamma = wide(weight)
    beta = torch.zeros_like(gamma) if bias is None else wide(bias)
    if residual is None and rms:
        out, rstd = torch.ops.npu.npu_rms_norm(z, gamma, epsilon=epsilon)
    elif residual is None:
        out, mean, rstd = torch.native_layer_norm(z, gamma.shape, gamma, beta, epsilon)
    elif rms:
        out, rstd, z = torch.ops.npu.npu_add_rms_norm(z, wide(residual), gamma, epsilon=epsilon)
    else:
        out, mean, rstd, z = torch.ops.npu.npu_add_layer_norm(
            z, wide(residual), gamma, beta, epsilon=epsilon, additional_output=True
        )
    if rms:
        mean = torch.zeros_like(rstd)
    # without scales and residual z is x0 itself, and a result may not be an input
    return rounded(out, x0.dtype), z.to(residual_dtype, copy=residual is None).contiguous(), mean, rstd


def backward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    inputs = NormGradientInputs(*args)
    dout, dz, z, weight, mean, rstd, *_, rms = inputs
    gamma = wide(weight)
    if rms:
        through, dweight = torch.ops.npu.npu_rms_norm_backward(wide(dout), wide(z), gamma, rstd)
        dbias = torch.zeros_like(gamma)
    else:
        through, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
            wide(dout), wide(z), gamma.shape, mean, rstd, gamma, gamma, [True, True, True]
        )
    dx0, dresidual, drow, dlayer = _input_gradients(wide(dz) + through, inputs)
    return dx0, dresidual, rounded(dweight, weight.dtype), rounded(dbias, weight.dtype), drow, dlayer


KERNELS: Final[dict[str, Kernel]] = {
    "npu_dropout_add_layer_norm": Kernel(forward, lambda *args: _supports(*args[:6])),
    "npu_dropout_add_layer_norm_backward": Kernel(
        backward,
        lambda dout, dz, z, weight, mean, rstd, x0, rowscale, layerscale, *_: _supports(z, dout, weight, rowscale, layerscale),
    ),
}
