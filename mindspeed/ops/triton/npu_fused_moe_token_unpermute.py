"""Kernels that move rows between tokens and experts: ``slots[t K + k]`` is the k-th row of token t if less than ``count``.

Every token is read or written once, by one program; a row that no slot names is left as it is.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def spread(tokens, slots, probs, rows, count, topk, width, WEIGHED: tl.constexpr, COLUMNS: tl.constexpr):
    """``rows[slots[t, k]] = probs[t, k] tokens[t]``: a token is read once and written K times."""
    across = tl.cdiv(width, COLUMNS)
    token = (tl.program_id(0) // across).to(tl.int64)
    column = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    value = tl.load(tokens + token * width + column, mask=inside, other=0)
    for k in range(topk):
        row = tl.load(slots + token * topk + k).to(tl.int64)
        kept = column < tl.where(row < count, width, 0)
        if WEIGHED:
            weighed = value.to(tl.float32) * tl.load(probs + token * topk + k).to(tl.float32)
            tl.store(rows + row * width + column, weighed.to(rows.dtype.element_ty), mask=kept)
        else:
            tl.store(rows + row * width + column, value, mask=kept)


@triton.jit
def gather(rows, slots, probs, tokens, count, topk, width, WEIGHED: tl.constexpr, COLUMNS: tl.constexpr):
    """``tokens[t] = sum_k probs[t, k] rows[slots[t, k]]``, summed in fp32 in the order of k."""
    across = tl.cdiv(width, COLUMNS)
    token = (tl.program_id(0) // across).to(tl.int64)
    column = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    total = tl.zeros([COLUMNS], tl.float32)
    for k in range(topk):
        row = tl.load(slots + token * topk + k).to(tl.int64)
        kept = column < tl.where(row < count, width, 0)
        value = tl.load(rows + row * width + column, mask=kept, other=0.0).to(tl.float32)
        if WEIGHED:
            value *= tl.load(probs + token * topk + k).to(tl.float32)
        total += value
    tl.store(tokens + token * width + column, total.to(tokens.dtype.element_ty), mask=inside)


@triton.jit
def spread_and_dot(dout, rows, slots, probs, drows, dprobs, count, topk, width, COLUMNS: tl.constexpr, TOPK: tl.constexpr):
    """Gradients of rows and probabilities: ``drows = probs dout`` and ``dprobs[t, k] = sum_j dout[t, j] rows[slot, j]``."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, TOPK)
    dots = tl.zeros([TOPK], tl.float32)
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = column < width
        value = tl.load(dout + token * width + column, mask=inside, other=0.0).to(tl.float32)
        for k in range(topk):
            row = tl.load(slots + token * topk + k).to(tl.int64)
            kept = column < tl.where(row < count, width, 0)
            weight = tl.load(probs + token * topk + k).to(tl.float32)
            tl.store(drows + row * width + column, (value * weight).to(drows.dtype.element_ty), mask=kept)
            other = tl.load(rows + row * width + column, mask=kept, other=0.0).to(tl.float32)
            dots += tl.where(slot == k, tl.sum(value * other, 0), 0.0)
    tl.store(dprobs + token * topk + slot, dots.to(dprobs.dtype.element_ty), mask=slot < topk)
