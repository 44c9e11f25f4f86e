"""fp32 weights that exist as their bf16 form and the 16 bits that rounding took from them.

A bf16 weight is the upper half of the fp32 one, rounded to the nearest, ties to even. The lower half as a signed number, the
residual, is what the fp32 word has more than the bf16 word with sixteen zeros behind it: one addition gives it back. Only a
tie, a lower half of exactly 0x8000, was rounded either way, so a bit is kept for each of these.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
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
                member.residual, member.ties = split(member.main, out=member.residual)
            member.conceal()
            if not member.is_parked and member.residual is not None:
                member.park(partial(_join, member, weight))


def _join(member: MainWeight, weight: Tensor, out: Tensor) -> Tensor:
    """Write the main weights into ``out``, which is where the residual is."""
    residual, ties = member.residual, member.ties
    if residual is None or ties is None:
        return out
    return join(weight.to(out.device), residual, ties.to(out.device), out)


def split(main: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return what ``main.bfloat16()`` lacks of the fp32 weights: residuals and the bits of the ties.

    ``main`` is contiguous. The residuals are int16 in one dimension, written into ``out`` if given. The bits, 1 for a tie that
    was rounded up, are packed into uint8 in the order of the ties.
    """
    words = main.view(torch.int32).view(-1)
    lower = main.view(-1).view(torch.int16)[_LOWER::2]
    residual = lower.clone() if out is None else out.copy_(lower)
    odd = words[(residual == TIE).nonzero().view(-1)] >> 16 & 1
    return residual, _packed(odd)


def join(weight: Tensor, residual: Tensor, ties: Tensor, out: Tensor) -> Tensor:
    """Write the fp32 weights that `split` received into ``out``, bit for bit. NaN remains NaN.

    ``weight`` is their bf16 form. All tensors are contiguous and on one device.
    """
    words = out.view(torch.int32).view(-1)
    words.copy_(weight.view(torch.int16).view(-1)).bitwise_left_shift_(16).add_(residual)
    if len(ties):
        places = (residual == TIE).nonzero().view(-1)
        words.index_add_(0, places, (1 - _unpacked(ties, len(places))) << 16)
    return out


def _packed(bits: Tensor) -> Tensor:
    """Eight bits in a byte, the first one lowest."""
    padded = torch.nn.functional.pad(bits, (0, -len(bits) % 8)).view(-1, 8)
    return (padded << torch.arange(8, device=bits.device)).sum(1).to(torch.uint8)


def _unpacked(packed: Tensor, count: int) -> Tensor:
    """The first ``count`` bits as int32."""
    shifts = torch.arange(8, dtype=torch.int32, device=packed.device)
    return ((packed[:, None].to(torch.int32) >> shifts) & 1).view(-1)[:count]
