"""fp32 weights that exist as their bf16 form and the 16 bits that rounding took from them.

A bf16 weight is the upper half of the fp32 one, rounded to the nearest, ties to even. The lower half as a signed number, the
residual, is what the fp32 word has more than the bf16 word with sixteen zeros behind it: one addition gives it back. Only a
tie, a lower half of exactly 0x8000, was rounded either way, so the place and the direction of each are kept.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, pairwise
from typing import Final

import torch
from torch import Tensor

from mindspeed.memory.windows import MainWeight, OptimizerWindow

TIE: Final = -0x8000
"""The residual of a tie."""
_LOWER: Final = 0 if sys.byteorder == "little" else 1


@contextmanager
def joined(window: OptimizerWindow) -> Iterator[None]:
    """Give a window its main weights, and keep residuals of them outside of windows.

    The main weights of bf16 weights are joined on entry, where they have been split before. On exit they are split and freed;
    after a *save* only freed. A *load* may have changed them, so the weights of the model follow.
    """
    pairs = [(member, member.weight) for member in window.weights if member.weight is not None]
    for member, weight in pairs:
        if member.residual is None:
            continue
        if window.use == "step":
            member.restore()
        else:
            member.expose(_join(member, weight, torch.empty(member.main.shape, device=member.residual.device)))
    try:
        yield
    finally:
        for member, weight in pairs:
            if window.use == "load":
                weight.copy_(member.main.view_as(weight))
        if window.use != "save":
            _split([member for member, _ in pairs])
        for member, weight in pairs:
            member.conceal()
            if not member.is_parked and member.residual is not None:
                member.park(partial(_join, member, weight))


def _join(member: MainWeight, weight: Tensor, out: Tensor) -> Tensor:
    """Write the main weights into ``out``, which is where the residual is."""
    residual, ties = member.residual, member.ties
    if residual is None or ties is None:
        return out
    return join(weight.to(out.device), residual, ties.to(out.device), out)


def _split(members: Sequence[MainWeight]) -> None:
    """Keep residuals and ties of main weights, which are on one device."""
    found = split([member.main for member in members], [member.residual for member in members])
    for member, (residual, ties) in zip(members, found, strict=True):
        member.residual, member.ties = residual, ties


def split(mains: Sequence[Tensor], residuals: Sequence[Tensor | None]) -> list[tuple[Tensor, Tensor]]:
    """Return what ``main.bfloat16()`` lacks of fp32 weights, for each tensor: residuals and ties.

    ``mains`` are contiguous and on one device, which is read once for all of them. Residuals are int16 in one dimension,
    written into those that are given. Ties are int64, for each twice its place, plus 1 where it was rounded up.
    """
    if not mains:
        return []
    sizes = [main.numel() for main in mains]
    is_tie = torch.empty(sum(sizes), dtype=torch.bool, device=mains[0].device)
    kept = []
    for main, residual, part in zip(mains, residuals, torch.split(is_tie, sizes), strict=True):
        lower = main.view(-1).view(torch.int16)[_LOWER::2]
        kept.append(lower.clone() if residual is None else residual.copy_(lower))
        torch.eq(kept[-1], TIE, out=part)
    places = is_tie.nonzero().view(-1)
    ties, starts = [], [0, *accumulate(sizes)]
    on_host = places.tolist()
    edges = [bisect_left(on_host, start) for start in starts]
    for main, start, (first, last) in zip(mains, starts, pairwise(edges), strict=False):
        own = places[first:last] - start
        ties.append(own * 2 + (main.view(-1).view(torch.int32)[own] >> 16 & 1))
    return list(zip(kept, ties, strict=True))


def join(weight: Tensor, residual: Tensor, ties: Tensor, out: Tensor) -> Tensor:
    """Write the fp32 weights that `split` received into ``out``, bit for bit, without reading the device. NaN remains NaN.

    ``weight`` is their bf16 form. All tensors are contiguous and on one device.
    """
    halves = out.view(-1).view(torch.int16)
    upper = halves[1 - _LOWER :: 2]
    halves[_LOWER::2].copy_(residual)
    torch.add(weight.view(-1).view(torch.int16), residual >> 15, out=upper)
    if len(ties):
        upper.index_add_(0, ties >> 1, (1 - (ties & 1)).to(torch.int16))
    return out
