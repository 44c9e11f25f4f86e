"""Kernel of `npu_rotary_position_embedding`, forward and backward: rows of pairs, turned by angles that rows may share.

``x`` is [A, B, C, 2 half] with any strides, ``y`` the same shape with its own, the tables have stride 0 where they are shared.
A program turns ROWS rows along C, the dimension that shares one row of the tables if there is one.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def turn(
    x,
    cos,
    sin,
    y,
    B,
    C,
    half,
    x_a,
    x_b,
    x_c,
    y_a,
    y_b,
    y_c,
    t_a,
    t_b,
    t_c,
    BACK: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    SHARED: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """``y = x cos + rot(x) sin``; with BACK ``y = x cos - rot(x sin)``, its transpose."""
    along = tl.cdiv(C, ROWS)
    ab = tl.program_id(0) // along
    a = (ab // B).to(tl.int64)
    b = (ab % B).to(tl.int64)
    c = ((tl.program_id(0) % along) * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    pair = tl.arange(0, PAIRS)[None, :]
    inside = (c < C) & (pair < half)
    x_row = x + a * x_a + b * x_b + c * x_c
    y_row = y + a * y_a + b * y_b + c * y_c
    if SHARED:
        at = a * t_a + b * t_b + tl.zeros([1, 1], tl.int64)
        seen = pair < half
    else:
        at = a * t_a + b * t_b + c * t_c
        seen = inside
    if NEIGHBOURS:
        element = tl.arange(0, 2 * PAIRS)[None, :]
        within = (c < C) & (element < 2 * half)
        known = element < 2 * half if SHARED else within
        x1, x2 = tl.split(tl.reshape(tl.load(x_row + element, mask=within, other=0.0), [ROWS, PAIRS, 2]))
        TABLE: tl.constexpr = 1 if SHARED else ROWS
        cos1, cos2 = tl.split(tl.reshape(tl.load(cos + at + element, mask=known, other=0.0), [TABLE, PAIRS, 2]))
        sin1, sin2 = tl.split(tl.reshape(tl.load(sin + at + element, mask=known, other=0.0), [TABLE, PAIRS, 2]))
    else:
        x1 = tl.load(x_row + pair, mask=inside, other=0.0)
        x2 = tl.load(x_row + half + pair, mask=inside, other=0.0)
        cos1 = tl.load(cos + at + pair, mask=seen, other=0.0)
        cos2 = tl.load(cos + at + half + pair, mask=seen, other=0.0)
        sin1 = tl.load(sin + at + pair, mask=seen, other=0.0)
        sin2 = tl.load(sin + at + half + pair, mask=seen, other=0.0)
    x1 = x1.to(tl.float32)
    x2 = x2.to(tl.float32)
    cos1 = cos1.to(tl.float32)
    cos2 = cos2.to(tl.float32)
    sin1 = sin1.to(tl.float32)
    sin2 = sin2.to(tl.float32)
    if BACK:
        y1 = x1 * cos1 + x2 * sin2
        y2 = x2 * cos2 - x1 * sin1
    else:
        y1 = x1 * cos1 - x2 * sin1
        y2 = x2 * cos2 + x1 * sin2
    y1 = y1.to(y.dtype.element_ty)
    y2 = y2.to(y.dtype.element_ty)
    if NEIGHBOURS:
        tl.store(y_row + element, tl.reshape(tl.join(y1, y2), [ROWS, 2 * PAIRS]), mask=within)
    else:
        tl.store(y_row + pair, y1, mask=inside)
        tl.store(y_row + half + pair, y2, mask=inside)


@triton.jit
def table_gradients(
    dy,
    x,
    dcos,
    dsin,
    B,
    C,
    half,
    d_a,
    d_b,
    d_c,
    x_a,
    x_b,
    x_c,
    NEIGHBOURS: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """``dcos = sum(dy x)`` and ``dsin = sum(dy rot(x))`` over C, in fp32; one program for one row [2 half] of the A B."""
    a = (tl.program_id(0) // B).to(tl.int64)
    b = (tl.program_id(0) % B).to(tl.int64)
    pair = tl.arange(0, PAIRS)
    if NEIGHBOURS:
        first = 2 * pair
        second = 2 * pair + 1
    else:
        first = pair
        second = half + pair
    cos1 = tl.zeros([ROWS, PAIRS], tl.float32)
    cos2 = tl.zeros([ROWS, PAIRS], tl.float32)
    sin1 = tl.zeros([ROWS, PAIRS], tl.float32)
    sin2 = tl.zeros([ROWS, PAIRS], tl.float32)
    for start in range(0, C, ROWS):
        c = (start + tl.arange(0, ROWS)[:, None]).to(tl.int64)
        inside = (c < C) & (pair[None, :] < half)
        d_row = dy + a * d_a + b * d_b + c * d_c
        x_row = x + a * x_a + b * x_b + c * x_c
        d1 = tl.load(d_row + first[None, :], mask=inside, other=0.0).to(tl.float32)
        d2 = tl.load(d_row + second[None, :], mask=inside, other=0.0).to(tl.float32)
        x1 = tl.load(x_row + first[None, :], mask=inside, other=0.0).to(tl.float32)
        x2 = tl.load(x_row + second[None, :], mask=inside, other=0.0).to(tl.float32)
        cos1 += d1 * x1
        cos2 += d2 * x2
        sin1 -= d1 * x2
        sin2 += d2 * x1
    at = tl.program_id(0).to(tl.int64) * (2 * half)
    tl.store(dcos + at + first, tl.sum(cos1, 0), mask=pair < half)
    tl.store(dcos + at + second, tl.sum(cos2, 0), mask=pair < half)
    tl.store(dsin + at + first, tl.sum(sin1, 0), mask=pair < half)
    tl.store(dsin + at + second, tl.sum(sin2, 0), mask=pair < half)
