"""Layouts of attention tensors: one view [B, N, S, D] of each, and the sequences of packed ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch.nn.functional as F
from torch import Tensor

from mindspeed.ops.numerics import unflatten

if TYPE_CHECKING:
    from mindspeed.ops.attention_arguments import AttentionOptions

LAYOUTS: Final = ("SBH", "BSH", "BSND", "BNSD", "TND")

Ranges = list[tuple[int, int]]


def ranges_of(ends: list[int] | None) -> Ranges:
    """``(start, end)`` of each packed sequence from the cumulative ends."""
    return list(zip([0, *(ends or [])[:-1]], ends or [], strict=True))


def lengths_of(query: Tensor, key: Tensor, options: AttentionOptions) -> Ranges:
    """``(queries, keys)`` of each sequence of a batch, or of each packed one."""
    if options.layout == "TND":
        spans = zip(ranges_of(options.q_ends), ranges_of(options.kv_ends), strict=True)
        return [(q[1] - q[0], kv[1] - kv[0]) for q, kv in spans]
    batch, queries = sizes(query, options.layout)
    return [(queries, sizes(key, options.layout)[1])] * batch


def probabilities(query: Tensor, key: Tensor, options: AttentionOptions) -> int:
    """Count the elements of the score matrices of a call."""
    return options.heads * sum(queries * keys for queries, keys in lengths_of(query, key, options))


def head_view(x: Tensor, layout: str, heads: int) -> Tensor:
    """``x`` of a dense layout as [B, N, S, D]; a view where x is contiguous, so that it can be written through."""
    if layout == "BNSD":
        return x
    if layout == "BSND":
        return x.transpose(1, 2)
    split = unflatten(x, -1, (heads, x.shape[-1] // heads))
    return split.permute(0, 2, 1, 3) if layout == "BSH" else split.permute(1, 2, 0, 3)


def packed_view(x: Tensor) -> Tensor:
    """All tokens of packed sequences, [T, N, D], as [1, N, T, D]."""
    return x.transpose(0, 1)[None]


def head_width(x: Tensor, layout: str, heads: int) -> int:
    """Width of one of ``heads`` heads."""
    return x.shape[-1] // heads if layout in ("SBH", "BSH") else x.shape[-1]


def sizes(x: Tensor, layout: str) -> tuple[int, int]:
    """``(batch, length)`` of a dense layout."""
    batch, length = {"SBH": (1, 0), "BSH": (0, 1), "BSND": (0, 1), "BNSD": (0, 2)}[layout]
    return x.shape[batch], x.shape[length]


def heads_like(x: Tensor, layout: str, other: Tensor, heads: int) -> int:
    """Heads of ``x`` (a key or value), given that ``other`` (the query) has ``heads`` heads of the same width."""
    if layout in ("SBH", "BSH"):
        width = other.shape[-1] // heads
        return x.shape[-1] // width if width else heads
    return x.shape[1] if layout in ("BNSD", "TND") else x.shape[2]


def padded_heads(x: Tensor, width: int) -> Tensor:
    """Heads of one width, elements side by side, as flash kernels want them: zeros change no product."""
    x = x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))
    return x if x.stride(-1) == 1 else x.contiguous()
