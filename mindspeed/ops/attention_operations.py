"""Pairs of query and key that a call of `fusion_attention` lets see."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mindspeed.ops.attention_layout import ranges_of, sizes
from mindspeed.ops.attention_mask import FULL_MASK_MODES, AttentionVisibility, visibility


def visible_pairs(query: Tensor, key: Tensor, mask: Tensor | None, options: Any) -> int:
    """Count the pairs of all heads and sequences of a call. A mask with an entry for every pair is read, unless it is fake."""
    if options.layout != "TND":
        (batch, queries), (_, keys) = sizes(query, options.layout), sizes(key, options.layout)
        prefix = None if options.prefix is None else tuple(options.prefix)
        return _pairs(mask, (batch, queries, keys), prefix, False, options)
    spans = [(q[1] - q[0], kv[1] - kv[0]) for q, kv in zip(ranges_of(options.q_ends), ranges_of(options.kv_ends), strict=True)]
    filled = [n for n, (queries, _) in enumerate(spans) if queries]
    edge = {7: filled[-1:], 8: filled[:1]}.get(options.mode, [])
    total = 0
    for n, span in enumerate(spans):
        prefix = None if options.prefix is None else (options.prefix[n],)
        total += _pairs(mask, (1, *span), prefix, n in edge, options)
    return total


def _pairs(
    mask: Tensor | None, shape: tuple[int, int, int], prefix: tuple[int, ...] | None, at_edge: bool, options: Any
) -> int:
    batch, queries, keys = shape
    if mask is None:
        return int(options.heads) * AttentionVisibility().pairs(queries, keys, batch)
    seen = visibility(options.mode, queries, keys, options.before, options.after, prefix, None, at_edge)
    if options.mode not in FULL_MASK_MODES or prefix is not None or _is_fake(mask):
        return int(options.heads) * seen.pairs(queries, keys, batch)
    hidden = mask[..., :queries, :keys]
    outside = seen.hidden((0, queries), (0, keys), mask.device)
    hidden = hidden if outside is None else hidden | outside
    repeated = batch * int(options.heads) * queries * keys // max(1, hidden.numel())
    return repeated * int((~hidden).sum())


def _is_fake(tensor: Tensor) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor) or tensor.device == torch.device("meta")
