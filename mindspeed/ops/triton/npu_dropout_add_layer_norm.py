"""Kernels of `npu_dropout_add_layer_norm`: dropout, scales, residual and norm of rows that are held whole.

A tensor that a call has not got is any other one, and its flag is False. ``kept`` is what dropout multiplies by.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _dropped(
    value,
    rowscale,
    layerscale,
    mask,
    row,
    column,
    rows,
    width,
    kept,
    ROWSCALE: tl.constexpr,
    LAYERSCALE: tl.constexpr,
    MASK: tl.constexpr,
):
    """``value rowscale layerscale mask kept``."""
    if ROWSCALE:
        value *= tl.load(rowscale + row, mask=row < rows, other=0.0).to(tl.float32)
    if LAYERSCALE:
        value *= tl.load(layerscale + column, mask=column < width, other=0.0).to(tl.float32)
    if MASK:
        inside = (row < rows) & (column < width)
        value *= tl.load(mask + row * width + column, mask=inside, other=0).to(tl.float32) * kept
    return value


@triton.jit
def forward(
    x0,
    residual,
    weight,
    bias,
    rowscale,
    layerscale,
    mask,
    out,
    z,
    mean,
    rstd,
    rows,
    width,
    kept,
    epsilon,
    RESIDUAL: tl.constexpr,
    BIAS: tl.constexpr,
    ROWSCALE: tl.constexpr,
    LAYERSCALE: tl.constexpr,
    MASK: tl.constexpr,
    RMS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """``z = drop(x0 rowscale layerscale) + residual`` and its norm, as it was before it was rounded."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < width)
    at = row * width + column
    value = tl.load(x0 + at, mask=inside, other=0.0).to(tl.float32)
    value = _dropped(value, rowscale, layerscale, mask, row, column, rows, width, kept, ROWSCALE, LAYERSCALE, MASK)
    if RESIDUAL:
        value += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(z + at, value.to(z.dtype.element_ty), mask=inside)
    if RMS:
        middle = tl.zeros([ROWS, 1], tl.float32)
        centred = value
    else:
        middle = (tl.sum(value, 1) / width)[:, None]
        centred = tl.where(inside, value - middle, 0.0)
    r = tl.rsqrt(tl.sum(centred * centred, 1) / width + epsilon)[:, None]
    tl.store(mean + row, middle, mask=row < rows)
    tl.store(rstd + row, r, mask=row < rows)
    result = centred * r * tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    if BIAS:
        result += tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def backward(
    dout,
    dz,
    z,
    weight,
    mean,
    rstd,
    x0,
    rowscale,
    layerscale,
    mask,
    dx0,
    dresidual,
    drow,
    parts,
    rows,
    width,
    kept,
    SCALES: tl.constexpr,
    ROWSCALE: tl.constexpr,
    LAYERSCALE: tl.constexpr,
    MASK: tl.constexpr,
    RMS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Gradients of ``x0``, the residual and ``rowscale``, and each program's share of those that are sums over rows.

    ``parts`` is [3, programs, width]: shares of the gradients of weight, bias and layerscale.
    """
    column = tl.arange(0, COLUMNS)[None, :]
    scale = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    share = tl.zeros([ROWS, COLUMNS], tl.float32)
    bias_share = tl.zeros([ROWS, COLUMNS], tl.float32)
    layer_share = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = (start + tl.arange(0, ROWS)[:, None]).to(tl.int64)
        inside = (row < rows) & (column < width)
        at = row * width + column
        r = tl.load(rstd + row, mask=row < rows, other=0.0)
        d = tl.load(dout + at, mask=inside, other=0.0).to(tl.float32)
        n = tl.load(z + at, mask=inside, other=0.0).to(tl.float32)
        if not RMS:
            n = tl.where(inside, n - tl.load(mean + row, mask=row < rows, other=0.0), 0.0)
        n *= r
        g = d * scale
        centred = g
        if not RMS:
            centred = g - (tl.sum(g, 1) / width)[:, None]
            bias_share += d
        share += d * n
        total = tl.load(dz + at, mask=inside, other=0.0).to(tl.float32)
        total += r * (centred - n * (tl.sum(g * n, 1) / width)[:, None])
        tl.store(dresidual + at, total.to(dresidual.dtype.element_ty), mask=inside)
        dx = _dropped(total, rowscale, layerscale, mask, row, column, rows, width, kept, ROWSCALE, LAYERSCALE, MASK)
        tl.store(dx0 + at, dx.to(dx0.dtype.element_ty), mask=inside)
        if SCALES:
            plain = total * tl.load(x0 + at, mask=inside, other=0.0).to(tl.float32)
            if ROWSCALE:
                by_row = _dropped(plain, rowscale, layerscale, mask, row, column, rows, width, kept, False, LAYERSCALE, MASK)
                by_row = tl.sum(tl.where(inside, by_row, 0.0), 1)[:, None]
                tl.store(drow + row, by_row.to(drow.dtype.element_ty), mask=row < rows)
            if LAYERSCALE:
                layer_share += _dropped(
                    plain, rowscale, layerscale, mask, row, column, rows, width, kept, ROWSCALE, False, MASK
                )
    across = tl.arange(0, COLUMNS)
    here = parts + tl.program_id(0) * width + across
    tl.store(here, tl.sum(share, 0), mask=across < width)
    if not RMS:
        tl.store(here + tl.num_programs(0) * width, tl.sum(bias_share, 0), mask=across < width)
    if SCALES and LAYERSCALE:
        tl.store(here + 2 * tl.num_programs(0) * width, tl.sum(layer_share, 0), mask=across < width)
