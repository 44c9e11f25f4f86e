"""Stand-in for Megatron's rotary embedding of queries and keys, with its signature, and its tables."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from mindspeed.ops.npu_rotary_position_embedding import HALF, INTERLEAVED, npu_rotary_position_embedding

Tables = tuple[Tensor, Tensor]

_TABLES: Final = WeakTensorKeyDictionary()
"""Cosines and sines by the tensor of angles that they were made from: queries and keys of all layers have the same one."""


def apply_rotary(
    t: Tensor,
    freqs: Tensor,
    rotary_interleaved: bool = False,
    mla_rotary_interleaved: bool = False,
    mscale: float = 1.0,
    *,
    inverse: bool = False,
    mla_output_remove_interleaving: bool = False,
    multi_latent_attention: bool | None = None,
) -> Tensor:
    """Rotate the first ``freqs.shape[-1]`` numbers of each head of ``t`` by the angles ``freqs``, and scale them by ``mscale``.

    ``t`` is [sequence, ..., head width], ``freqs`` [sequence, ..., rotated width] broadcasts to it; Megatron 0.20 also takes
    a head dimension of 1 that ``t`` lacks. ``inverse`` rotates back. Latent attention has pairs of neighbours
    (``mla_rotary_interleaved``, before Megatron 0.19 ``multi_latent_attention``), which go to halves first and stay there
    without ``mla_output_remove_interleaving``.
    """
    width = freqs.shape[-1]
    rotated = t if width == t.shape[-1] else t[..., :width]
    interleaved = mla_rotary_interleaved or multi_latent_attention
    if interleaved:
        rotated = torch.cat((rotated[..., ::2], rotated[..., 1::2]), -1)
    cos, sin = _tables(freqs, mscale, t.dtype, inverse)
    if cos.dim() == t.dim() + 1 and cos.shape[-2] == 1:
        cos, sin = cos.squeeze(-2), sin.squeeze(-2)
    y = npu_rotary_position_embedding(rotated, cos, sin, INTERLEAVED if rotary_interleaved else HALF)
    if interleaved and mla_output_remove_interleaving:
        y = torch.stack(y.chunk(2, -1), -1).flatten(-2)
    return y if width == t.shape[-1] else torch.cat((y, t[..., width:]), -1)


def _tables(freqs: Tensor, mscale: float, dtype: torch.dtype, inverse: bool) -> Tables:
    """``mscale`` times cosine and sine, rounded to ``dtype``; remembered as long as the angles live and do not change."""
    if freqs.requires_grad or torch.compiler.is_compiling():
        return _made(freqs, mscale, dtype, inverse)
    # what inference mode makes cannot be saved for backward, and knows no version
    version = -1 if freqs.is_inference() else freqs._version
    key = (mscale, dtype, inverse, version, torch.is_inference_mode_enabled())
    known: dict[tuple[object, ...], Tables] = _TABLES.setdefault(freqs, {})  # type: ignore[no-untyped-call]
    if key not in known:
        known[key] = _made(freqs, mscale, dtype, inverse)
    return known[key]


def _made(freqs: Tensor, mscale: float, dtype: torch.dtype, inverse: bool) -> Tables:
    sin = (torch.sin(freqs) * mscale).to(dtype)
    return (torch.cos(freqs) * mscale).to(dtype), -sin if inverse else sin
