"""Kernels of `swiglu`: ``x`` is [rows, 2, half] in memory, the result [rows, half]."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def forward(x, y, rows, half, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """``y = a sigmoid(a) b`` for one tile of ROWS x COLUMNS results."""
    across = tl.cdiv(half, COLUMNS)
    row = (tl.program_id(0) // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < half)
    first = row * (2 * half) + column
    a = tl.load(x + first, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + first + half, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * half + column, (a * tl.sigmoid(a) * b).to(y.dtype.element_ty), mask=inside)


@triton.jit
def backward(dy, x, dx, rows, half, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """``da = dy b s (1 + a (1 - s))`` and ``db = dy a s`` with ``s = sigmoid(a)``."""
    across = tl.cdiv(half, COLUMNS)
    row = (tl.program_id(0) // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < half)
    first = row * (2 * half) + column
    a = tl.load(x + first, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + first + half, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(dy + row * half + column, mask=inside, other=0.0).to(tl.float32)
    s = tl.sigmoid(a)
    tl.store(dx + first, (d * b * s * (1 + a * (1 - s))).to(dx.dtype.element_ty), mask=inside)
    tl.store(dx + first + half, (d * a * s).to(dx.dtype.element_ty), mask=inside)
