"""`npu_dropout_add_layer_norm` on CUDA: one pass over rows of up to 8192; wider rows run the reference."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from mindspeed.ops.npu_dropout_add_layer_norm import NormGradientInputs, NormInputs, _kept
from mindspeed.ops.registration import Kernel
from mindspeed.ops.triton import npu_dropout_add_layer_norm as kernels
from mindspeed.ops.triton.launch import cores, launch, pieces, takes, warps, whole_rows
from mindspeed.ops.triton.sums import column_sums

_WIDEST: Final = 8192


def _supports(x: Tensor, *others: Tensor | None) -> bool:
    return takes(x, *others) and 0 < x.shape[-1] <= _WIDEST


def _supports_forward(x0: Tensor, *rest: Any) -> bool:
    optional, residual_dtype = rest[:5], rest[8]
    return _supports(x0, *optional) and residual_dtype != torch.float64


def _supports_backward(dout: Tensor, *rest: Any) -> bool:
    dz, z, weight, _, _, x0, rowscale, layerscale = rest[:8]
    return _supports(dout, dz, z, weight, x0, rowscale, layerscale)


def _sizes(width: int, rows: int) -> dict[str, int]:
    tall, wide = whole_rows(width, rows)
    return {"ROWS": tall, "COLUMNS": wide, "num_warps": warps(2 * tall * wide)}


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """Return the tensor to hand to a kernel for one that may be missing."""
    return other if tensor is None else tensor.contiguous()


def forward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``(out, z, mean, rstd)``."""
    x0, residual, weight, bias, rowscale, layerscale, mask, p, epsilon, residual_dtype, rms = NormInputs(*args)
    optional = (residual, weight, bias, rowscale, layerscale)
    x0, width = x0.contiguous(), x0.shape[-1]
    rows = x0.numel() // width
    out, z = x0.new_empty(x0.shape), x0.new_empty(x0.shape, dtype=residual_dtype)
    mean = x0.new_empty((*x0.shape[:-1], 1), dtype=torch.float32)
    rstd, sizes = torch.empty_like(mean), _sizes(width, rows)
    launch(
        kernels.forward,
        pieces(rows, sizes["ROWS"]),
        *(x0, *(_or(tensor, x0) for tensor in (*optional, mask)), out, z, mean, rstd),
        *(rows, width, _kept(p), epsilon),
        RESIDUAL=residual is not None,
        BIAS=bias is not None,
        ROWSCALE=rowscale is not None,
        LAYERSCALE=layerscale is not None,
        MASK=mask is not None,
        RMS=rms,
        **sizes,
    )
    return out, z, mean, rstd


def backward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x0, residual, weight, bias, rowscale, layerscale; those of scales are empty without ``x0``."""
    dout, dz, z, weight, mean, rstd, x0, rowscale, layerscale, mask, p, rms = NormGradientInputs(*args)
    tensors = [t.contiguous() for t in (dout, dz, z, weight, mean, rstd)]
    tensors += [_or(tensor, tensors[0]) for tensor in (x0, rowscale, layerscale, mask)]
    width = dout.shape[-1]
    rows = dout.numel() // width
    sizes = _sizes(width, rows)
    programs = min(pieces(rows, sizes["ROWS"]), 2 * cores(dout.device))
    dx0, dresidual = dout.new_empty(dout.shape), z.new_empty(z.shape)
    drow, dlayer = (
        dout.new_empty(0) if x0 is None or scale is None else scale.new_empty(scale.shape) for scale in (rowscale, layerscale)
    )
    parts = dout.new_empty((3, programs, width), dtype=torch.float32)
    launch(
        kernels.backward,
        programs,
        *(*tensors, dx0, dresidual, drow, parts, rows, width, _kept(p)),
        SCALES=x0 is not None,
        ROWSCALE=rowscale is not None,
        LAYERSCALE=layerscale is not None,
        MASK=mask is not None,
        RMS=rms,
        **sizes,
    )
    dweight, dbias = weight.new_empty(weight.shape), weight.new_zeros(weight.shape)
    sums = ((dweight, True), (dbias, not rms), (dlayer, dlayer.numel() > 0))
    for part, (grad, wanted) in zip(parts.unbind(), sums, strict=True):
        columns = pieces(width, 64) if wanted else 0
        launch(column_sums, columns, part, grad, programs, width, ROWS=32, COLUMNS=64)
    return dx0, dresidual, dweight, dbias, drow, dlayer


KERNELS: Final[dict[str, Kernel]] = {
    "npu_dropout_add_layer_norm": Kernel(forward, _supports_forward),
    "npu_dropout_add_layer_norm_backward": Kernel(backward, _supports_backward),
}
