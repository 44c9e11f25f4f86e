"""`fusion_attention` by torch's flash kernel for CPU: blocks of queries and keys stay in the cache, key heads are shared.

What the kernel cannot take runs the reference: dropout, the gradient of a bias, and tensors without elements. Causal and
full attention are one call, causal attention to more keys than queries is two, whose results are merged; any other
visibility is one call per strip of queries, with a mask or bias of that strip alone. A mask and bias that depend on the
distance of query and key, such as a window or ALiBi, are one vector: with the queries of a strip in reverse order, each row of
its block begins one number after the row before.
Statistics are ``(logsumexp, 1)``. The kernel rounds the probabilities of half-precision inputs to their type.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from mindspeed.ops.attention_arguments import AttentionGradientInputs, AttentionOptions
from mindspeed.ops.attention_layout import padded_heads
from mindspeed.ops.attention_scores import AttentionBatch, AttentionScores, Span
from mindspeed.ops.fusion_attention import by_parts, gradients_by_parts
from mindspeed.ops.numerics import filled, wide_type
from mindspeed.ops.registration import Kernel

_NUMBERS: Final = 1 << 20
"""Entries in the mask of one strip, unless that would leave fewer than ``_ROWS`` queries."""
_ROWS: Final = 64
_RELATIVE_ROWS: Final = 256
"""Queries in a strip whose mask and bias are a vector: with fewer the kernel packs keys more often, with more it computes more
hidden pairs."""


class ScoreTile(NamedTuple):
    """Queries ``rows`` against the keys ``columns``, causal from their corner or with ``added`` to the logits.

    ``added`` is [B | 1, N | 1, rows, columns], -inf for a hidden key. ``more``: an earlier tile has the same queries.
    ``reverse``: the rows of ``added`` belong to the queries from the last to the first.
    """

    rows: Span
    columns: Span
    causal: bool = False
    added: Tensor | None = None
    more: bool = False
    reverse: bool = False

    @property
    def is_empty(self) -> bool:
        """Return whether the queries see no key."""
        return self.columns[0] == self.columns[1]

    def queries(self, x: Tensor) -> Tensor:
        """Return a view of the tile's queries in a tensor [B, N, S, ...]."""
        return _span(x, self.rows)

    def keys(self, x: Tensor) -> Tensor:
        """Return a view of the tile's keys in a tensor [B, K, T, ...]."""
        return _span(x, self.columns)

    def ordered(self, x: Tensor, dimension: int = 2) -> Tensor:
        """Put queries into the order of ``added``, or from it into the order in which they follow one another."""
        return x.flip(dimension) if self.reverse else x


def _span(x: Tensor, span: Span) -> Tensor:
    start, end = span
    return x if end - start == x.shape[2] else x.narrow(2, start, end - start)


def _tiles(scores: AttentionScores, dtype: torch.dtype, device: torch.device) -> Iterator[ScoreTile]:
    """All queries, with what they see; a tile without columns has queries that see nothing."""
    seen, (queries, keys) = scores.visibility, scores.size
    if not queries or not keys:  # a packed sequence without tokens; the kernel divides by their number
        yield ScoreTile((0, queries), (0, 0))
        return
    whole = scores.bias is None and seen.mask is None and seen.prefix is None
    if whole and (seen.first is None or queries - 1 + seen.first <= 0):
        if seen.last is None or seen.last >= keys - 1:
            yield ScoreTile((0, queries), (0, keys))
            return
        if seen.last <= 0:
            if seen.last:
                yield ScoreTile((0, min(-seen.last, queries)), (0, 0))
            if -seen.last < queries:
                yield ScoreTile((-seen.last, queries), (0, keys), causal=True)
            return
        yield ScoreTile((0, queries), (0, seen.last))
        yield ScoreTile((0, queries), (seen.last, min(keys, seen.last + queries)), causal=True, more=True)
        return
    relative = _is_relative(scores)
    rows = _RELATIVE_ROWS if relative else max(_ROWS, _NUMBERS // (keys * _planes(scores)))
    strips = [(start, min(start + rows, queries)) for start in range(0, queries, rows)]
    spans = [(strip, seen.columns(*strip, keys)) for strip in strips]
    if relative:
        yield from _relative_tiles(scores, spans, dtype, device)
        return
    for strip, columns in spans:
        added = _added(scores, dtype, device, strip, columns) if columns[0] < columns[1] else None
        yield ScoreTile(strip, columns, added=added)


def _is_relative(scores: AttentionScores) -> bool:
    """Return whether what is added to a logit depends on the distance of query and key, and is -inf for all heads or none."""
    seen, bias = scores.visibility, scores.bias
    return seen.mask is None and seen.prefix is None and (bias is None or bias.kind >= 2)


def _relative_tiles(
    scores: AttentionScores, spans: list[tuple[Span, Span]], dtype: torch.dtype, device: torch.device
) -> Iterator[ScoreTile]:
    """Tiles of strips and columns whose blocks are views of what is added at each distance from query to key."""
    first = min(columns[0] - strip[1] + 1 for strip, columns in spans)
    last = max(columns[1] - strip[0] for strip, columns in spans)
    by_distance = _added(scores, dtype, device, (0, 1), (first, last))
    for strip, columns in spans:
        added = None
        if by_distance is not None and columns[0] < columns[1]:
            size = (*by_distance.shape[:-2], strip[1] - strip[0], columns[1] - columns[0])
            start = columns[0] - strip[1] + 1 - first
            added = by_distance.as_strided(size, (*by_distance.stride()[:-2], 1, 1), start)
        yield ScoreTile(strip, columns, added=added, reverse=True)


def _planes(scores: AttentionScores) -> int:
    """Return how many planes [queries, keys] the mask and the bias have together."""
    seen, bias = scores.visibility, None if scores.bias is None else scores.bias.tensor
    prefixes = 1 if seen.prefix is None else len(seen.prefix)
    shapes = [x.shape[:-2] for x in (seen.mask, bias) if x is not None]
    planes: torch.Size = torch.broadcast_shapes((prefixes, 1, 1), *shapes)  # type: ignore[no-untyped-call]
    return planes.numel()


def _added(scores: AttentionScores, dtype: torch.dtype, device: torch.device, rows: Span, columns: Span) -> Tensor | None:
    hidden = scores.visibility.hidden(rows, columns, device)
    size = (rows[1] - rows[0], columns[1] - columns[0])
    if scores.bias is not None:
        block = scores.bias.block(rows, columns).to(dtype)
        added = block * scores.scale if scores.bias.kind == 1 else block
        added = added.expand(*added.shape[:-2], *size)
        if hidden is not None:  # a block of an external bias may be the bias itself, and a mask may have more sequences
            in_place = scores.bias.kind >= 2 and (hidden.dim() == 2 or len(hidden) <= len(added))
            added = (added.masked_fill_ if in_place else added.masked_fill)(hidden, -torch.inf)
    elif hidden is None or not hidden.any():
        return None
    else:
        added = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)
    return added if added.dim() == 2 else added.flatten(1, 2)


def _supports(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> bool:
    return options.keep_prob == 1 and filled(query, key, value)


def _padded(tensors: list[Tensor]) -> list[Tensor]:
    """Tensors whose heads all have the largest width."""
    width = max(x.shape[-1] for x in tensors)
    return [padded_heads(x, width) for x in tensors]


def _forward_part(part: AttentionBatch) -> None:
    q_view, out = part.query_side
    maximum, total = part.stats
    q, k, v = _padded([q_view, *part.key_side])
    for tile in _tiles(part.scores, maximum.dtype, q.device):
        its_out, its_maximum, its_total = map(tile.queries, (out, maximum, total))
        if tile.is_empty:
            its_out.zero_()
            its_maximum.fill_(-torch.inf)
            its_total.zero_()
            continue
        result, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            tile.ordered(tile.queries(q)),
            tile.keys(k),
            tile.keys(v),
            0.0,
            tile.causal,
            attn_mask=tile.added,
            scale=part.scores.scale,
        )
        result, logsumexp = tile.ordered(result[..., : out.shape[-1]]), tile.ordered(logsumexp)
        if tile.more:
            _merge(its_out, its_maximum, result, logsumexp)
            continue
        its_out.copy_(result)
        if tile.added is None:
            its_maximum.copy_(logsumexp)
            its_total.fill_(1.0)
        else:
            seen = tile.ordered(_seen(part.scores, tile.added), -1)
            its_maximum.copy_(torch.where(seen, logsumexp, -torch.inf))
            its_total.copy_(seen)


def _seen(scores: AttentionScores, added: Tensor) -> Tensor:
    """Return which queries see a key, [rows] or [B | 1, N | 1, rows]."""
    plane = added[..., :1, :, :] if added.dim() > 2 and _is_relative(scores) else added
    return (plane > -torch.inf).any(-1)


def _merge(out: Tensor, logsumexp: Tensor, more: Tensor, its_logsumexp: Tensor) -> None:
    """Add the result for further keys, in place; every query sees keys on both sides."""
    together = torch.logaddexp(logsumexp, its_logsumexp)
    weight, its_weight = ((x - together).exp()[..., None] for x in (logsumexp, its_logsumexp))
    out.copy_(out * weight + more * its_weight)
    logsumexp.copy_(together)


def _backward_part(part: AttentionBatch, dbias: Tensor | None) -> None:
    """Write the gradients; the statistics may be any whose ``maximum + log(sum)`` is the logsumexp."""
    q_view, out, dout, dq = part.query_side
    k_view, v_view, dk, dv = part.key_side
    maximum, total = part.stats
    # of a row that sees nothing the kernel needs any number: exp(-inf - number) is zero
    logsumexp = torch.where(total > 0, maximum + total.log(), 0.0)
    q, k, v, out, dout = _padded([q_view, k_view, v_view, out, dout])
    sums: list[Tensor] = []
    for tile in _tiles(part.scores, maximum.dtype, q.device):
        its_dq = tile.queries(dq)
        if tile.is_empty:
            its_dq.zero_()
            continue
        its_dout, its_q, its_out, its_logsumexp = (tile.ordered(tile.queries(x)) for x in (dout, q, out, logsumexp))
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            its_dout,
            its_q,
            tile.keys(k),
            tile.keys(v),
            its_out,
            its_logsumexp,
            0.0,
            tile.causal,
            attn_mask=tile.added,
            scale=part.scores.scale,
        )
        share = tile.ordered(grads[0][..., : dq.shape[-1]])
        if tile.more:
            its_dq.add_(share)
        else:
            its_dq.copy_(share)
        if tile.columns == (0, k.shape[2]) and not sums and tile.rows[1] == q.shape[2]:
            dk.copy_(grads[1][..., : dk.shape[-1]])  # the only strip
            dv.copy_(grads[2][..., : dv.shape[-1]])
            return
        sums = sums or [torch.zeros(x.shape, dtype=wide_type(x.dtype), device=x.device) for x in (dk, dv)]
        for sum_, grad in zip(sums, grads[1:], strict=True):
            tile.keys(sum_).add_(grad[..., : sum_.shape[-1]])
    for grad, sum_ in zip((dk, dv), sums or [torch.zeros(())] * 2, strict=True):
        grad.copy_(sum_)


def _supports_forward(query: Tensor, key: Tensor, value: Tensor, pse: Any, mask: Any, *rest: Any) -> bool:
    return _supports(query, key, value, AttentionOptions(*rest))


def _supports_backward(*args: Any) -> bool:
    inputs = AttentionGradientInputs.of(*args)
    return not inputs.of_pse and _supports(inputs.query, inputs.key, inputs.value, inputs.options)


KERNELS: Final[dict[str, Kernel]] = {
    "fusion_attention": Kernel(partial(by_parts, _forward_part), _supports_forward),
    "fusion_attention_backward": Kernel(partial(gradients_by_parts, _backward_part), _supports_backward),
}
