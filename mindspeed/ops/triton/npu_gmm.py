"""Kernels of grouped matrix products. Programs stay and take one tile after the other; groups are never read by the host.

``ends`` [E] are the ends of the groups of rows. Tiles of one group follow one another, in columns of SWEEP tiles of rows, so
that programs which run at the same time share operands.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _place(local, tall, wide, SWEEP: tl.constexpr):
    """The tile number ``local`` of ``tall`` x ``wide``: down SWEEP tiles, then the next column."""
    sweep = local // (SWEEP * wide)
    height = tl.minimum(tall - sweep * SWEEP, SWEEP)
    within = local - sweep * (SWEEP * wide)
    return sweep * SWEEP + within % height, within // height


@triton.jit
def by_rows(
    x,
    weight,
    bias,
    out,
    ends,
    places,
    rows,
    groups,
    K,
    N,
    x_m,
    x_k,
    w_e,
    w_k,
    w_n,
    SEPARATE: tl.constexpr,
    BIAS: tl.constexpr,
    WHOLE_K: tl.constexpr,
    GROUPS: tl.constexpr,
    PRECISION: tl.constexpr,
    M_TILE: tl.constexpr,
    N_TILE: tl.constexpr,
    K_TILE: tl.constexpr,
    SWEEP: tl.constexpr,
):
    """``out[m] = x[m] weight[e] + bias[e]`` for the group e of row m.

    With SEPARATE the matrix of a group begins ``places[e]`` elements after ``weight``, a multiple of 16.
    """
    group = tl.arange(0, GROUPS)
    known = group < groups
    last = tl.minimum(tl.load(ends + group, mask=known, other=0), rows).to(tl.int32)
    first = tl.load(ends + group - 1, mask=known & (group > 0), other=0).to(tl.int32)
    wide = tl.cdiv(N, N_TILE)
    counts = tl.where(known, tl.cdiv(tl.maximum(last - first, 0), M_TILE) * wide, 0)
    until = tl.cumsum(counts, 0)
    tiles = tl.sum(counts, 0)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        e = tl.sum((until <= tile).to(tl.int32), 0)
        mine = group == e
        start = tl.sum(tl.where(mine, first, 0), 0)
        end = tl.sum(tl.where(mine, last, 0), 0)
        local = tile - tl.sum(tl.where(mine, until - counts, 0), 0)
        m_tile, n_tile = _place(local, tl.cdiv(end - start, M_TILE), wide, SWEEP)
        m = start + m_tile * M_TILE + tl.arange(0, M_TILE)
        n = n_tile * N_TILE + tl.arange(0, N_TILE)
        k = tl.arange(0, K_TILE)
        x_at = x + m.to(tl.int64)[:, None] * x_m + k[None, :] * x_k
        place = tl.multiple_of(tl.load(places + e), 16) if SEPARATE else e.to(tl.int64) * w_e
        w_at = weight + place + n.to(tl.int64)[None, :] * w_n + k[:, None] * w_k
        within_m = m[:, None] < end
        within_n = n[None, :] < N
        total = tl.zeros([M_TILE, N_TILE], tl.float32)
        for step in range(tl.cdiv(K, K_TILE)):
            if WHOLE_K:
                a = tl.load(x_at, mask=within_m, other=0.0)
                b = tl.load(w_at, mask=within_n, other=0.0)
            else:
                a = tl.load(x_at, mask=within_m & (k[None, :] < K - step * K_TILE), other=0.0)
                b = tl.load(w_at, mask=within_n & (k[:, None] < K - step * K_TILE), other=0.0)
            total = tl.dot(a, b, total, input_precision=PRECISION)
            x_at += K_TILE * x_k
            w_at += K_TILE * w_k
        if BIAS:
            total += tl.load(bias + e.to(tl.int64) * N + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        at = out + m.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(at, total.to(out.dtype.element_ty), mask=within_m & within_n)


@triton.jit
def by_groups(
    x,
    dy,
    out,
    ends,
    order,
    rows,
    groups,
    K,
    N,
    x_m,
    x_k,
    y_m,
    y_n,
    ADD: tl.constexpr,
    PRECISION: tl.constexpr,
    K_TILE: tl.constexpr,
    N_TILE: tl.constexpr,
    M_TILE: tl.constexpr,
    SWEEP: tl.constexpr,
):
    """``out[e] = x_e^T dy_e``, added to the present values with ADD. ``order`` names the groups, the one with most rows
    first."""
    tall = tl.cdiv(K, K_TILE)
    wide = tl.cdiv(N, N_TILE)
    each = tall * wide
    for tile in range(tl.program_id(0), groups * each, tl.num_programs(0)):
        e = tl.load(order + tile // each).to(tl.int32)
        end = tl.minimum(tl.load(ends + e), rows).to(tl.int32)
        start = tl.load(ends + e - 1, mask=e > 0, other=0).to(tl.int32)
        k_tile, n_tile = _place(tile % each, tall, wide, SWEEP)
        k = k_tile * K_TILE + tl.arange(0, K_TILE)
        n = n_tile * N_TILE + tl.arange(0, N_TILE)
        m = tl.arange(0, M_TILE)
        x_at = x + (start + m).to(tl.int64)[None, :] * x_m + k.to(tl.int64)[:, None] * x_k
        y_at = dy + (start + m).to(tl.int64)[:, None] * y_m + n.to(tl.int64)[None, :] * y_n
        within_k = k[:, None] < K
        within_n = n[None, :] < N
        total = tl.zeros([K_TILE, N_TILE], tl.float32)
        for first in range(start, end, M_TILE):
            a = tl.load(x_at, mask=within_k & (m[None, :] < end - first), other=0.0)
            b = tl.load(y_at, mask=within_n & (m[:, None] < end - first), other=0.0)
            total = tl.dot(a, b, total, input_precision=PRECISION)
            x_at += M_TILE * x_m
            y_at += M_TILE * y_m
        at = out + e.to(tl.int64) * K * N + k.to(tl.int64)[:, None] * N + n[None, :]
        if ADD:
            total += tl.load(at, mask=within_k & within_n, other=0.0)
        tl.store(at, total.to(out.dtype.element_ty), mask=within_k & within_n)


@triton.jit
def row_sums(dy, out, ends, rows, N, y_m, y_n, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """``out[e] = sum of the rows of group e``, in fp32."""
    across = tl.cdiv(N, COLUMNS)
    e = tl.program_id(0) // across
    n = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)
    end = tl.minimum(tl.load(ends + e), rows).to(tl.int32)
    start = tl.load(ends + e - 1, mask=e > 0, other=0).to(tl.int32)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(start, end, ROWS):
        m = first + tl.arange(0, ROWS)
        at = dy + m.to(tl.int64)[:, None] * y_m + n.to(tl.int64)[None, :] * y_n
        total += tl.load(at, mask=(m[:, None] < end) & (n[None, :] < N), other=0.0).to(tl.float32)
    tl.store(out + e.to(tl.int64) * N + n, tl.sum(total, 0), mask=n < N)
