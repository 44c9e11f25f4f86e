"""Attention in strips of queries: the plain-torch arithmetic of `fusion_attention`, forward and backward.

A strip holds the probabilities of some queries for all the keys that they see, so memory grows with the length of the
sequences and not with its square. Shapes: B batch, K key heads, G query heads per key head, S queries, T keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from mindspeed.ops.attention_scores import AttentionBatch, AttentionScores, Span
from mindspeed.ops.numerics import wide

_NUMBERS: Final = 1 << 22
"""Probabilities in one strip, unless that would leave fewer than ``_ROWS`` queries."""
_ROWS: Final = 64


def _strips(q_BKGSD: Tensor, scores: AttentionScores) -> Iterator[tuple[Span, Span]]:
    """Ranges of queries, each with the range of keys that they may see."""
    b, k, g, queries, _ = q_BKGSD.shape
    rows = max(_ROWS, _NUMBERS // max(b * k * g * scores.size[1], 1))
    for start in range(0, queries, rows):
        end = min(start + rows, queries)
        yield (start, end), scores.visibility.columns(start, end, scores.size[1])


def _product(x_BKGSD: Tensor, y_BKDT: Tensor) -> Tensor:
    """Matrix product of all the heads of a group with what they share."""
    b, k, g, s, _ = x_BKGSD.shape
    return (x_BKGSD.flatten(2, 3) @ y_BKDT).view(b, k, g, s, y_BKDT.shape[-1])


def _shifted(logits: Tensor, maximum: Tensor) -> Tensor:
    """``exp(logits - maximum)``; in a row that sees no key the maximum is -inf and all of it is zero."""
    return torch.exp(logits - maximum.masked_fill(maximum == -torch.inf, 0)[..., None])


def forward(part: AttentionBatch) -> None:
    """Write the result, and the maximum and the sum of each row's softmax, [B, K, G, S]."""
    (q_BKGSD, out_BKGSE), (k_BKTD, v_BKTE), (maximum, total), scores = part
    k_wide, v_wide = wide(k_BKTD), wide(v_BKTE)
    maximum.fill_(-torch.inf)
    total.zero_()
    for rows, columns in _strips(q_BKGSD, scores):
        here, there = slice(*rows), slice(*columns)
        if columns[0] == columns[1]:
            out_BKGSE[..., here, :] = 0
            continue
        products = _product(wide(q_BKGSD[..., here, :]), k_wide[:, :, there].transpose(-1, -2))
        logits = scores.logits(products, rows, columns)
        maximum[..., here] = logits.amax(-1)
        weights = _shifted(logits, maximum[..., here])
        total[..., here] = weights.sum(-1)
        if scores.dropout is not None:
            weights = weights * scores.dropout.factors(rows, columns, weights.dtype)
        sums = total[..., here, None]
        out_BKGSE[..., here, :] = _product(weights, v_wide[:, :, there]) / sums.masked_fill(sums == 0, 1)


def backward(part: AttentionBatch, dbias: Tensor | None) -> None:
    """Write the gradients of queries, keys and values, and add that of the bias to ``dbias``, if there is one.

    With P the probabilities and M the dropout factors: ``dV = (P M)^T dO``, ``dP = (dO V^T) M``,
    ``dS = P (dP - rowsum(dO O))``, ``dQ = scale dS K``, ``dK = scale dS^T Q``.
    """
    (q_BKGSD, out_BKGSE, dout_BKGSE, dq), (k_BKTD, v_BKTE, dk, dv), (maximum, total), scores = part
    k_wide, v_wide = wide(k_BKTD), wide(v_BKTE)
    dk_wide, dv_wide = torch.zeros_like(k_wide), torch.zeros_like(v_wide)
    for rows, columns in _strips(q_BKGSD, scores):
        here, there = slice(*rows), slice(*columns)
        if columns[0] == columns[1]:
            dq[..., here, :] = 0
            continue
        q_strip, dout_strip = wide(q_BKGSD[..., here, :]), wide(dout_BKGSE[..., here, :])
        logits = scores.logits(_product(q_strip, k_wide[:, :, there].transpose(-1, -2)), rows, columns)
        sums = total[..., here, None]
        weights = _shifted(logits, maximum[..., here]) / sums.masked_fill(sums == 0, 1)
        dweights = _product(dout_strip, v_wide[:, :, there].transpose(-1, -2))
        kept = weights
        if scores.dropout is not None:
            factors = scores.dropout.factors(rows, columns, weights.dtype)
            kept, dweights = weights * factors, dweights * factors
        delta = (dout_strip * wide(out_BKGSE[..., here, :])).sum(-1, keepdim=True)
        dlogits = weights * (dweights - delta)
        if dbias is not None and scores.bias is not None:
            scaled = dlogits * scores.scale if scores.bias.kind == 1 else dlogits
            scores.bias.add_gradient(dbias, scaled, rows, columns)
        dq[..., here, :] = _product(dlogits, k_wide[:, :, there]) * scores.scale
        dk_wide[:, :, there] += dlogits.flatten(2, 3).transpose(-1, -2) @ q_strip.flatten(2, 3) * scores.scale
        dv_wide[:, :, there] += kept.flatten(2, 3).transpose(-1, -2) @ dout_strip.flatten(2, 3)
    dk.copy_(dk_wide)
    dv.copy_(dv_wide)
