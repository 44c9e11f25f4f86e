"""Layouts of attention tensors: one view [B, N, S, D] of each, and the sequences of packed ones."""

from __future__ import annotations

from typing import Final

from torch import Tensor

from mindspeed.ops.numerics import unflatten

DENSE: Final = {"SBH": "SBH", "BSH": "BSH", "BSND": "BSND", "BNSD": "BNSD"}
LAYOUTS: Final = (*DENSE, "TND")

Ranges = list[tuple[int, int]]


def ranges_of(ends: list[int] | None) -> Ranges:
    """``(start, end)`` of each packed sequence from the cumulative ends."""
    return list(zip([0, *(ends or [])[:-1]], ends or [], strict=True))


def head_view(x: Tensor, layout: str, heads: int) -> Tensor:
    """``x`` of a dense layout as [B, N, S, D]; a view where x is contiguous, so that it can be written through."""
    if layout == "BNSD":
        return x
    if layout == "BSND":
        return x.transpose(1, 2)
    split = unflatten(x, -1, (heads, x.shape[-1] // heads))
    return split.permute(0, 2, 1, 3) if layout == "BSH" else split.permute(1, 2, 0, 3)


def sequence_view(x: Tensor, start: int, end: int) -> Tensor:
    """Tokens of one packed sequence of [T, N, D] as [1, N, S, D]."""
    return x[start:end].transpose(0, 1)[None]


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
