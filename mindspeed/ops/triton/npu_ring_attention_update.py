"""Kernel of `npu_ring_attention_update`: rows of N heads per token, merged with weights from their statistics.

A row r of the outputs is head ``r % N`` of token ``t = r // N``. Its statistics are LANES numbers; ORDER says where:
0: [B, N, S] with ``t = s B + b``; 1: [T, N]; 2: [N, length] of each packed sequence, start and length given per token.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def merge(
    out1,
    max1,
    sum1,
    out2,
    max2,
    sum2,
    out,
    maximum,
    total,
    starts,
    lengths,
    rows,
    heads,
    width,
    batch,
    sequence,
    lanes,
    ORDER: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LANES: tl.constexpr,
):
    """``m = max(m1, m2)``, ``s_i' = s_i exp(m_i - m)``, ``s = s1' + s2'``, ``out = out1 s1'/s + out2 s2'/s``."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    token = row // heads
    head = row % heads
    if ORDER == 0:
        at = ((token % batch) * heads + head) * sequence + token // batch
    elif ORDER == 1:
        at = row
    else:
        start = tl.load(starts + token, mask=row < rows, other=0)
        length = tl.load(lengths + token, mask=row < rows, other=0)
        at = start * heads + head * length + (token - start)
    lane = tl.arange(0, LANES)[None, :]
    there = (row < rows) & (lane < lanes)
    at = at * lanes + lane
    m1 = tl.load(max1 + at, mask=there, other=0.0)
    m2 = tl.load(max2 + at, mask=there, other=0.0)
    m = tl.maximum(m1, m2)
    # exp(-inf - -inf) is not a number: where neither side saw a key, both shares are zero
    seen = m > float("-inf")
    base = tl.where(seen, m, 0.0)
    s1 = tl.where(seen, tl.load(sum1 + at, mask=there, other=0.0) * tl.exp(m1 - base), 0.0)
    s2 = tl.where(seen, tl.load(sum2 + at, mask=there, other=0.0) * tl.exp(m2 - base), 0.0)
    s = s1 + s2
    tl.store(maximum + at, m, mask=there)
    tl.store(total + at, s, mask=there)
    first = lane == 0
    divisor = tl.where(s > 0, s, 1.0)
    w1 = tl.sum(tl.where(first & (s > 0), s1 / divisor, 0.0), 1)[:, None]
    w2 = tl.sum(tl.where(first & (s > 0), s2 / divisor, 0.0), 1)[:, None]
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)[None, :]
        inside = (row < rows) & (column < width)
        where = row * width + column
        o1 = tl.load(out1 + where, mask=inside, other=0.0).to(tl.float32)
        o2 = tl.load(out2 + where, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + where, (o1 * w1 + o2 * w2).to(out.dtype.element_ty), mask=inside)
