"""Attention of [sequence, batch, heads, width] tensors by `fusion_attention`: which keys are seen, said as its sparse modes.

Plain torch, without Megatron and without globals.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from mindspeed.ops.fusion_attention import UNBOUNDED, fusion_attention

ALL, CAUSAL, BAND = 1, 3, 4
"""Sparse modes: what the mask lets see, causal to the last key, and a window around that diagonal."""
FULL_MASK = (0, 1)
"""Sparse modes that read a mask with an entry for each query and key."""
COMPRESSED = 2048


@dataclass(frozen=True, slots=True)
class Seen:
    """Which keys a query sees: a sparse mode with its window, and the mask of the modes that read one, True hidden."""

    mode: int = ALL
    before: int = UNBOUNDED
    after: int = UNBOUNDED
    mask: Tensor | None = None


def attend(
    q_SBND: Tensor,
    k_TBKD: Tensor,
    v_TBKE: Tensor,
    seen: Seen,
    scale: float,
    keep_prob: float = 1.0,
) -> Tensor:
    """Attention as [S, B, N * E]; K key heads divide N query heads."""
    q, k, v = (x.flatten(2) for x in (q_SBND, k_TBKD, v_TBKE))
    heads, device = q_SBND.shape[2], q.device
    mask = _broadcast(seen.mask, q.shape[0], k.shape[0]) if seen.mode in FULL_MASK else compressed_mask(device)
    window = {"pre_tokens": seen.before, "next_tokens": seen.after}
    out: Tensor = fusion_attention(
        q, k, v, heads, "SBH", atten_mask=mask, scale=scale, keep_prob=keep_prob, sparse_mode=seen.mode, **window
    )[0]
    return out


def attend_packed(
    q_TND: Tensor,
    k_TKD: Tensor,
    v_TKE: Tensor,
    ends: tuple[list[int], list[int]],
    seen: Seen,
    scale: float,
    keep_prob: float = 1.0,
) -> Tensor:
    """Attention within each of the packed sequences that end at ``ends`` (of queries, of keys), as [T, N, E]."""
    mask = seen.mask if seen.mode in FULL_MASK else compressed_mask(q_TND.device)
    lengths = {"actual_seq_qlen": ends[0], "actual_seq_kvlen": ends[1], "softmax_layout": "TND"}
    window = {"pre_tokens": seen.before, "next_tokens": seen.after}
    how = {"atten_mask": mask, "scale": scale, "keep_prob": keep_prob, "sparse_mode": seen.mode}
    out: Tensor = fusion_attention(q_TND, k_TKD, v_TKE, q_TND.shape[1], "TND", **how, **window, **lengths)[0]
    return out


@lru_cache(maxsize=8)
def compressed_mask(device: torch.device) -> Tensor:
    """The one mask of all modes that need none in full: 4 MiB, made once for each device."""
    with torch.inference_mode(False):  # one that is made in inference mode could not be used in training
        return torch.ones(COMPRESSED, COMPRESSED, dtype=torch.bool, device=device).triu_(1)


def _broadcast(mask: Tensor | None, queries: int, keys: int) -> Tensor | None:
    return mask if mask is None else mask.expand(*mask.shape[:-2], queries, keys)
