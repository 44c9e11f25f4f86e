"""Attention of local queries to one block of keys after another, and its gradients, as if all keys had been there at once.

Tensors are [tokens, batch, heads, width], as Megatron has them. The running result is kept in fp32 (fp64 for fp64 input)
with the maximum m and the sum s of the softmax, in the repetitions that the device's kernel makes; a block of keys is merged by

    m = max(m_a, m_b),    t_i = s_i exp(m_i - m),    s = t_a + t_b,    out = out_a t_a / s + out_b t_b / s

(Milakov and Gimelshein, arXiv 1805.02867; Liu et al., arXiv 2310.01889). Backward needs only the final ``lse = m + log(s)``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mindspeed.context_parallel.layout import Span
from mindspeed.context_parallel.randomness import numbers_of_rank
from mindspeed.context_parallel.tiles import Tile, tiles, together
from mindspeed.ops.attention_mask import CAUSAL, AttentionVisibility, compressed_mask
from mindspeed.ops.fusion_attention import UNBOUNDED, lanes
from mindspeed.ops.numerics import unflatten

_ALL_KEYS, _BY_MASK, _TO_LAST_KEY = 0, 1, 3
"""Sparse modes of the operator: every key, a given mask, the last query sees the last key."""


@dataclass(frozen=True, slots=True)
class Scoring:
    """The rules by which queries and keys become probabilities: visibility, scale, ALiBi slopes, dropout.

    ``slopes`` [heads] (fp32) add ``-slope * |query - key|`` to the scores (ALiBi, arXiv 2108.12409).
    """

    scale: float
    visibility: AttentionVisibility = CAUSAL
    slopes: Tensor | None = None
    dropout_p: float = 0.0
    rank: int = 0

    def own_numbers(self, device: torch.device) -> AbstractContextManager[None]:
        """Let ranks with one random state drop different places."""
        return numbers_of_rank(self.rank, device) if self.dropout_p else nullcontext()


class Statistics(NamedTuple):
    """The maximum and the sum of the softmax of each row, [batch, heads, tokens, lanes]; (-inf, 0) where nothing is seen."""

    maximum: Tensor
    total: Tensor

    @property
    def lse(self) -> Tensor:
        """The logarithm of the softmax's denominators, [batch, heads, tokens]."""
        return self.maximum[..., 0] + self.total[..., 0].log()


def statistics(lse: Tensor) -> Statistics:
    """Give the statistics of known denominators, [batch, heads, tokens], as the device's kernels read them."""
    seen = (lse > -torch.inf).to(lse.dtype)
    shape = (*lse.shape, lanes(lse.device))
    return Statistics(*(x[..., None].expand(shape).contiguous() for x in (lse, seen)))


@dataclass(frozen=True, slots=True)
class BlockCall:
    """Describe a call of the operator: a tile, the rows of the batch that it is for, and its mask.

    ``ends`` are the ends of the packed documents in the tile, of queries and of keys. Once the call is done, ``state`` is the
    random state of its dropout.
    """

    tile: Tile
    batch: slice
    mask: Tensor | None
    ends: tuple[list[int], list[int]] | None = None
    state: Tensor | None = None

    def covers(self, query: Tensor, key: Tensor) -> bool:
        """Return whether this call alone computes all rows, with all keys."""
        whole = self.batch == slice(None) or query.shape[1] == 1
        return whole and self.tile.rows == (0, query.shape[0]) and self.tile.columns == (0, key.shape[0])


@dataclass(slots=True)
class Running:
    """The result so far: ``out`` [tokens, batch, heads, width], wide, and its statistics."""

    out: Tensor
    statistics: Statistics
    _done: list[tuple[slice, Span]] = field(default_factory=list)

    def add(self, batch: slice, rows: Span, out: Tensor, found: Statistics, seen: bool = False) -> None:
        """Merge a result for some rows, [rows, batch, heads, width]. ``seen``: each of them sees a key."""
        first = not any(batch == other and rows[0] < end and begin < rows[1] for other, (begin, end) in self._done)
        self._done.append((batch, rows))
        here = slice(*rows)
        views = [self.out[here, batch], *(x[batch, :, here] for x in self.statistics)]
        results: Sequence[Tensor] = (out, *found)
        if not first:
            results = merge(views[0], Statistics(*views[1:]), out, found, seen)
            if views[0].shape == self.out.shape:
                self.out, self.statistics = results[0], Statistics(*results[1:])
                return
        for view, result in zip(views, results, strict=True):
            if result is not view:
                view.copy_(result)


def start(q: Tensor, value_width: int) -> Running:
    """Give the result of no keys at all."""
    wide = torch.promote_types(q.dtype, torch.float32)
    tokens, batch, heads, _ = q.shape
    out = q.new_zeros((tokens, batch, heads, value_width), dtype=wide)
    shape = (batch, heads, tokens, lanes(q.device))
    return Running(out, Statistics(q.new_full(shape, -torch.inf, dtype=wide), q.new_zeros(shape, dtype=wide)))


def parts(
    scoring: Scoring, queries: Sequence[Span], keys: Sequence[Span], device: torch.device, rows: Span | None = None
) -> Iterator[BlockCall]:
    """The calls for local queries and a block of keys, both given by their global ranges; of the queries only ``rows``."""
    seen = scoring.visibility
    mask = None if seen.mask is None else torch.cat([seen.mask[..., a:b] for a, b in keys], -1)
    first, last = rows or (0, sum(end - begin for begin, end in queries))
    for batch, ends in [(slice(n, n + 1), ends) for n, ends in enumerate(seen.ends)] or [(slice(None), ())]:
        found = tiles(_between(queries, first, last), keys, seen.causal, ends, join=scoring.slopes is None)
        for tile, packed in together(found, bool(ends), scoring.slopes is not None):
            here = tile._replace(rows=(first + tile.rows[0], first + tile.rows[1]))
            cut = None if mask is None else mask[..., slice(*here.rows), slice(*here.columns)]
            yield BlockCall(here, batch, compressed_mask(device) if here.causal else cut, packed)


def _between(spans: Sequence[Span], first: int, last: int) -> list[Span]:
    """Global ranges of the local tokens from ``first`` to ``last``."""
    found, place = [], 0
    for begin, end in spans:
        low, high = begin + max(first - place, 0), min(end, begin + last - place)
        if low < high:
            found.append((low, high))
        place += end - begin
    return found


def accumulate_block(running: Running, scoring: Scoring, part: BlockCall, q: Tensor, k: Tensor, v: Tensor) -> BlockCall:
    """Merge a part of a block of keys into the running result; gives the part with the random state of its call."""
    out, found, state = attend(scoring, part, q, k, v)
    running.add(part.batch, part.tile.rows, out, found, seen=part.mask is None or part.tile.causal)
    return replace(part, state=state)


def attend(scoring: Scoring, part: BlockCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Statistics, Tensor | None]:
    """Give the result of a part, [its rows, its batch, heads, width], its statistics and its random state."""
    here, there = slice(*part.tile.rows), slice(*part.tile.columns)
    inputs = [_laid_out(x[tokens, part.batch], part) for x, tokens in ((q, here), (k, there), (v, there))]
    call = torch.ops.mindspeed.fusion_attention
    out, maximum, total, state = call(*inputs, scoring.slopes, part.mask, *_options(scoring, part, q))
    heads = q.shape[2]
    if part.ends is None:
        return unflatten(out, 2, (heads, -1)), Statistics(maximum, total), state
    return out[:, None], Statistics(*(x.transpose(0, 1)[None] for x in (maximum, total))), state


def merge(out: Tensor, found: Statistics, new_out: Tensor, new: Statistics, seen: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Give the merged result, perhaps written over ``out``, with its maximum and sum.

    ``seen``: each row was seen by one side or both. A row that neither side saw stays zero.
    """
    maximum = torch.maximum(found.maximum, new.maximum)
    base = maximum if seen else maximum.masked_fill(maximum == -torch.inf, 0)
    shares = [side.total * (side.maximum - base).exp() for side in (found, new)]
    total = shares[0] + shares[1]
    divisor = total if seen else total.masked_fill(total == 0, 1)
    old_weight, new_weight = ((share / divisor)[..., :1].permute(2, 0, 1, 3) for share in shares)
    return out.mul_(old_weight).add_(new_out * new_weight), maximum, total


def gradients(
    scoring: Scoring, part: BlockCall, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, found: Statistics
) -> tuple[Tensor, Tensor, Tensor]:
    """This part's share of the gradients of the queries of its rows and of the keys and values of its columns."""
    here, there = slice(*part.tile.rows), slice(*part.tile.columns)
    dout, q_rows, out = (_laid_out(x[here, part.batch], part) for x in (dout, q, out))
    k_rows, v_rows = (_laid_out(x[there, part.batch], part) for x in (k, v))
    rows = [x[part.batch, :, here] for x in found]
    rows = rows if part.ends is None else [x[0].transpose(0, 1).contiguous() for x in rows]
    inputs = (dout, q_rows, k_rows, v_rows, scoring.slopes, part.mask, part.state if scoring.dropout_p else None)
    backward = torch.ops.mindspeed.fusion_attention_backward
    *grads, _ = backward(*inputs, out, *rows, False, *_options(scoring, part, q))
    if part.ends is not None:
        return grads[0][:, None], grads[1][:, None], grads[2][:, None]
    heads, groups = q.shape[2], k.shape[2]
    return unflatten(grads[0], 2, (heads, -1)), unflatten(grads[1], 2, (groups, -1)), unflatten(grads[2], 2, (groups, -1))


def _laid_out(x: Tensor, part: BlockCall) -> Tensor:
    """[tokens, batch, heads, width] as the operator reads it: SBH, or packed documents of one row of the batch as TND."""
    return x.flatten(2) if part.ends is None else x[:, 0]


def _options(scoring: Scoring, part: BlockCall, q: Tensor) -> tuple[Any, ...]:
    mode = _TO_LAST_KEY if part.tile.causal else _ALL_KEYS if part.mask is None else _BY_MASK
    arithmetic = (scoring.scale, 1 - scoring.dropout_p, UNBOUNDED, UNBOUNDED)
    pse_type = 1 if scoring.slopes is None else 2
    layout, ends = ("SBH", (None, None)) if part.ends is None else ("TND", part.ends)
    return q.shape[2], layout, *arithmetic, None, *ends, mode, pse_type, part.tile.start, 0
