"""Attention of local queries to one block of keys after another, and its gradients, as if all keys had been there at once.

Tensors are [tokens, batch, heads, width], as Megatron has them. The running result is kept in fp32 (fp64 for fp64 input)
with the logarithm of the softmax's denominator; a block of keys is merged by

    lse = log(exp(lse_a) + exp(lse_b)),    out = out_a exp(lse_a - lse) + out_b exp(lse_b - lse)

(Milakov and Gimelshein, arXiv 1805.02867; Liu et al., arXiv 2310.01889). Backward needs only the final lse.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mindspeed.context_parallel.layout import Span
from mindspeed.context_parallel.tiles import Tile, tiles
from mindspeed.ops.attention_mask import CAUSAL, AttentionVisibility, compressed_mask
from mindspeed.ops.fusion_attention import UNBOUNDED
from mindspeed.ops.numerics import unflatten

_ALL_KEYS, _BY_MASK, _TO_LAST_KEY = 0, 1, 3
"""Sparse modes of the operator: every key, a given mask, the last query sees the last key."""


@dataclass(frozen=True, slots=True)
class Scoring:
    """The rules by which queries and keys become probabilities: visibility, scale, ALiBi slopes, dropout.

    ``slopes`` [heads] (fp32) add ``-slope * |query - key|`` to the scores (ALiBi, arXiv 2108.12409). Seeds of dropout are
    drawn from the device's generator and mixed with ``rank``, so that ranks with one random state drop other places.
    """

    scale: float
    visibility: AttentionVisibility = CAUSAL
    slopes: Tensor | None = None
    dropout_p: float = 0.0
    rank: int = 0


@dataclass(slots=True)
class Running:
    """The result so far: ``out`` [tokens, batch, heads, width] and ``lse`` [batch, heads, tokens], both wide."""

    out: Tensor
    lse: Tensor


@dataclass(frozen=True, slots=True)
class BlockCall:
    """Describe a call of the operator: a tile, the rows of the batch that it is for, its mask and the seed of its dropout."""

    tile: Tile
    batch: slice
    mask: Tensor | None
    seed: Tensor | None


def start(q: Tensor, value_width: int) -> Running:
    """Give the result of no keys at all."""
    wide = torch.promote_types(q.dtype, torch.float32)
    tokens, batch, heads, _ = q.shape
    out = q.new_zeros((tokens, batch, heads, value_width), dtype=wide)
    return Running(out, q.new_full((batch, heads, tokens), -torch.inf, dtype=wide))


def parts(
    scoring: Scoring, queries: Sequence[Span], keys: Sequence[Span], device: torch.device, rows: Span | None = None
) -> Iterator[BlockCall]:
    """The calls for local queries and a block of keys, both given by their global ranges; of the queries only ``rows``."""
    seen = scoring.visibility
    mask = None if seen.mask is None else torch.cat([seen.mask[..., a:b] for a, b in keys], -1)
    first, last = rows or (0, sum(end - begin for begin, end in queries))
    for batch, ends in [(slice(n, n + 1), ends) for n, ends in enumerate(seen.ends)] or [(slice(None), ())]:
        for tile in tiles(_between(queries, first, last), keys, seen.causal, ends, join=scoring.slopes is None):
            here = tile._replace(rows=(first + tile.rows[0], first + tile.rows[1]))
            cut = None if mask is None else mask[..., slice(*here.rows), slice(*here.columns)]
            yield BlockCall(here, batch, compressed_mask(device) if here.causal else cut, seed(scoring, device))


def seed(scoring: Scoring, device: torch.device) -> Tensor | None:
    """A new seed of dropout, this rank's own; None without dropout."""
    if not scoring.dropout_p:
        return None
    return torch.randint(1 << 62, (), dtype=torch.int64, device=device).bitwise_xor_(
        scoring.rank * 0x9E3779B97F4A7C15 % (1 << 62)
    )


def _between(spans: Sequence[Span], first: int, last: int) -> list[Span]:
    """Global ranges of the local tokens from ``first`` to ``last``."""
    found, place = [], 0
    for begin, end in spans:
        low, high = begin + max(first - place, 0), min(end, begin + last - place)
        if low < high:
            found.append((low, high))
        place += end - begin
    return found


def accumulate_block(running: Running, scoring: Scoring, part: BlockCall, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Merge a part of a block of keys into the running result."""
    here, there = slice(*part.tile.rows), slice(*part.tile.columns)
    inputs = [x[tokens, part.batch].flatten(2) for x, tokens in ((q, here), (k, there), (v, there))]
    optional = (scoring.slopes, part.mask, part.seed)
    out, maximum, total = torch.ops.mindspeed.fusion_attention(*inputs, *optional, *_options(scoring, part, q))
    merge(running.out[here, part.batch], running.lse[part.batch, :, here], out, maximum + total.log())


def merge(out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor) -> None:
    """Merge in place; rows that neither side saw stay zero."""
    together = torch.logaddexp(lse, new_lse)
    finite = together.masked_fill(together == -torch.inf, 0)
    old_weight, new_weight = ((x - finite).exp().permute(2, 0, 1)[..., None] for x in (lse, new_lse))
    out.mul_(old_weight).add_(new_out.view(out.shape) * new_weight)
    lse.copy_(together)


def gradients(
    scoring: Scoring, part: BlockCall, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """This part's share of the gradients of the queries of its rows and of the keys and values of its columns."""
    here, there = slice(*part.tile.rows), slice(*part.tile.columns)
    dout, q_rows, out = (x[here, part.batch].flatten(2) for x in (dout, q, out))
    k_rows, v_rows = (x[there, part.batch].flatten(2) for x in (k, v))
    lse = lse[part.batch, :, here]
    inputs = (dout, q_rows, k_rows, v_rows, scoring.slopes, part.mask, part.seed)
    results = (out, lse, (lse > -torch.inf).to(lse.dtype))
    backward = torch.ops.mindspeed.fusion_attention_backward
    dq, dk, dv, _ = backward(*inputs, *results, False, *_options(scoring, part, q))
    heads, groups = q.shape[2], k.shape[2]
    return unflatten(dq, 2, (heads, -1)), unflatten(dk, 2, (groups, -1)), unflatten(dv, 2, (groups, -1))


def _options(scoring: Scoring, part: BlockCall, q: Tensor) -> tuple[Any, ...]:
    mode = _TO_LAST_KEY if part.tile.causal else _ALL_KEYS if part.mask is None else _BY_MASK
    arithmetic = (scoring.scale, 1 - scoring.dropout_p, UNBOUNDED, UNBOUNDED)
    pse_type = 1 if scoring.slopes is None else 2
    return q.shape[2], "SBH", *arithmetic, None, None, None, mode, pse_type, part.tile.start, 0
