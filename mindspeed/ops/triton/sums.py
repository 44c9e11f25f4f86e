"""Sums over the rows of a matrix, in two kernels and one order: parts of the rows first, then the parts."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def column_sums(parts, out, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """``out[j] = sum_i parts[i, j]``, rounded to the type of ``out``; one program for COLUMNS columns."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        at = row.to(tl.int64) * width + column
        total += tl.load(parts + at, mask=(row < rows) & (column < width), other=0.0).to(tl.float32)
    at = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    tl.store(out + at, tl.sum(total, 0).to(out.dtype.element_ty), mask=at < width)
