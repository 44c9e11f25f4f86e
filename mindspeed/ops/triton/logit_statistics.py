"""Kernels of `logit_statistics` and `logit_gradient`: a program reads the row of one token once, in blocks of COLUMNS."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def statistics(logits, rows, largest, sums, tokens, width, TOTAL: tl.constexpr, EXPECTED: tl.constexpr, COLUMNS: tl.constexpr):
    """Sum over a row relative to the largest logit so far; a larger one rescales the sums."""
    token = tl.program_id(0).to(tl.int64)
    top = float("-inf")
    exponentials, total, products = 0.0, 0.0, 0.0
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = column < width
        x = tl.load(logits + token * width + column, mask=inside, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(top, tl.max(x, 0))
        shift = tl.where(top == float("-inf"), 0.0, top - larger)
        scale = tl.exp(shift)
        z = x - tl.where(larger == float("-inf"), 0.0, larger)
        e = tl.exp(z)
        if EXPECTED:
            products = (products + shift * exponentials) * scale + tl.sum(tl.where(e == 0.0, 0.0, z * e), 0)
        if TOTAL:
            total += shift * start + tl.sum(tl.where(inside, z, 0.0), 0)
        exponentials = exponentials * scale + tl.sum(e, 0)
        top = larger
    row = tl.load(rows + token)
    has_label = (row >= 0) & (row < width)
    picked = tl.load(logits + token * width + row, mask=has_label, other=0.0).to(tl.float32)
    tl.store(largest + token, top)
    tl.store(sums + token, exponentials)
    tl.store(sums + tokens + token, picked)
    tl.store(sums + 2 * tokens + token, total)
    tl.store(sums + 3 * tokens + token, products)


@triton.jit
def gradient(
    logits,
    largest,
    log_sums,
    factors,
    rows,
    tokens,
    width,
    across,
    TOTAL: tl.constexpr,
    EXPECTED: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Replace COLUMNS logits of one token by their gradients."""
    token = (tl.program_id(0) // across).to(tl.int64)
    column = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    at = logits + token * width + column
    z = tl.maximum(tl.load(at, mask=inside, other=0.0).to(tl.float32) - tl.load(largest + token), -200.0)
    factor = tl.load(factors + token)
    if EXPECTED:
        factor = factor + tl.load(factors + 3 * tokens + token) * z
    value = tl.exp(z - tl.load(log_sums + token)) * factor
    if TOTAL:
        value += tl.load(factors + 2 * tokens + token)
    value += tl.where(column == tl.load(rows + token), tl.load(factors + tokens + token), 0.0)
    tl.store(at, value.to(logits.dtype.element_ty), mask=inside)
