"""Kernels of `rms_norm` and `rms_norm_residual`: a row is held whole, or read twice in blocks of COLUMNS."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def forward(
    x, residual, gamma, y, total, rstd, rows, width, epsilon, RESIDUAL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Normalize ROWS whole rows of ``x`` in each program, or of ``x + residual``, which is written to ``total``."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < width)
    at = row * width + column
    v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        v += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(total + at, v.to(total.dtype.element_ty), mask=inside)
    r = tl.rsqrt(tl.sum(v * v, 1) / width + epsilon)[:, None]
    tl.store(rstd + row, r, mask=row < rows)
    scale = tl.load(gamma + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(y + at, (v * r * scale).to(y.dtype.element_ty), mask=inside)


@triton.jit
def forward_long(x, residual, gamma, y, total, rstd, width, epsilon, RESIDUAL: tl.constexpr, COLUMNS: tl.constexpr):
    """Normalize one row in each program, in two passes over its blocks."""
    row = tl.program_id(0).to(tl.int64)
    squares = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = column < width
        at = row * width + column
        v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        if RESIDUAL:
            v += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
            tl.store(total + at, v.to(total.dtype.element_ty), mask=inside)
        squares += v * v
    r = tl.rsqrt(tl.sum(squares, 0) / width + epsilon)
    tl.store(rstd + row, r)
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = column < width
        at = row * width + column
        v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        if RESIDUAL:  # the sum as it was before it was rounded
            v += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(gamma + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(y + at, (v * r * scale).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _rows(dy, x, rstd, start, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Load the parts of the gradient of the rows from ``start`` on."""
    row = (start + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < width)
    at = row * width + column
    d = tl.load(dy + at, mask=inside, other=0.0)
    v = tl.load(x + at, mask=inside, other=0.0)
    return d, v, tl.load(rstd + row, mask=row < rows, other=0.0)


@triton.jit
def backward(
    dy,
    x,
    gamma,
    rstd,
    dtotal,
    dx,
    parts,
    rows,
    width,
    RESIDUAL: tl.constexpr,
    AHEAD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """``dx = r (g - n mean(g n))``, plus ``dtotal``; each program adds up its rows' share of dgamma in ``parts[program]``.

    With AHEAD the next rows are read while these are computed.
    """
    column = tl.arange(0, COLUMNS)[None, :]
    scale = tl.load(gamma + column, mask=column < width, other=0.0).to(tl.float32)
    share = tl.zeros([ROWS, COLUMNS], tl.float32)
    first = tl.program_id(0) * ROWS
    step = tl.num_programs(0) * ROWS
    if AHEAD:
        d_next, v_next, r_next = _rows(dy, x, rstd, first, rows, width, ROWS, COLUMNS)
    for start in range(first, rows, step):
        if AHEAD:
            d, v, r = d_next, v_next, r_next
            d_next, v_next, r_next = _rows(dy, x, rstd, start + step, rows, width, ROWS, COLUMNS)
        else:
            d, v, r = _rows(dy, x, rstd, start, rows, width, ROWS, COLUMNS)
        row = (start + tl.arange(0, ROWS)[:, None]).to(tl.int64)
        inside = (row < rows) & (column < width)
        at = row * width + column
        d = d.to(tl.float32)
        n = v.to(tl.float32) * r
        g = d * scale
        result = r * (g - n * (tl.sum(g * n, 1) / width)[:, None])
        if RESIDUAL:
            result += tl.load(dtotal + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + at, result.to(dx.dtype.element_ty), mask=inside)
        share += d * n
    column = tl.arange(0, COLUMNS)
    tl.store(parts + tl.program_id(0) * width + column, tl.sum(share, 0), mask=column < width)


@triton.jit
def backward_long(dy, x, gamma, rstd, dtotal, dx, width, RESIDUAL: tl.constexpr, COLUMNS: tl.constexpr):
    """The gradient of one row of ``x``, in two passes over its blocks."""
    row = tl.program_id(0).to(tl.int64)
    r = tl.load(rstd + row)
    dots = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = column < width
        at = row * width + column
        g = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        g *= tl.load(gamma + column, mask=inside, other=0.0).to(tl.float32)
        dots += g * tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * r
    mean = tl.sum(dots, 0) / width
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = column < width
        at = row * width + column
        g = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        g *= tl.load(gamma + column, mask=inside, other=0.0).to(tl.float32)
        result = r * (g - tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * r * mean)
        if RESIDUAL:
            result += tl.load(dtotal + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + at, result.to(dx.dtype.element_ty), mask=inside)


@triton.jit
def gamma_long(dy, x, rstd, parts, rows, width, per_part, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The share of dgamma of ``per_part`` rows, for COLUMNS columns of rows that are too long to be held."""
    across = tl.cdiv(width, COLUMNS)
    part = tl.program_id(0) // across
    column = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    share = tl.zeros([ROWS, COLUMNS], tl.float32)
    end = tl.minimum(rows, (part + 1) * per_part)
    for start in range(part * per_part, end, ROWS):
        row = (start + tl.arange(0, ROWS)[:, None]).to(tl.int64)
        inside = (row < end) & (column < width)
        at = row * width + column
        n = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * tl.load(rstd + row, mask=row < end, other=0.0)
        share += tl.load(dy + at, mask=inside, other=0.0).to(tl.float32) * n
    column = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)
    tl.store(parts + part * width + column, tl.sum(share, 0), mask=column < width)
