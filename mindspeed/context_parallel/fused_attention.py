"""Attention of [sequence, batch, heads, width] tensors by `fusion_attention`: which keys are seen, said as its sparse modes.

Plain torch, without Megatron and without globals.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mindspeed.context_parallel.position_bias import PositionBias
from mindspeed.ops.attention_mask import compressed_mask
from mindspeed.ops.attention_scores import COMPRESSED_ROWS
from mindspeed.ops.fusion_attention import UNBOUNDED, fusion_attention

ALL, CAUSAL, BAND = 1, 3, 4
"""Sparse modes: what the mask lets see, causal to the last key, and a window around that diagonal."""
FULL_MASK = (0, 1)
"""Sparse modes that read a mask with an entry for each query and key."""


@dataclass(frozen=True, slots=True)
class SparseMode:
    """A sparse mode of the operator with its window, and the mask of the modes that read one, True hidden."""

    mode: int = ALL
    before: int = UNBOUNDED
    after: int = UNBOUNDED
    mask: Tensor | None = None


def attend(
    q_SBND: Tensor,
    k_TBKD: Tensor,
    v_TBKE: Tensor,
    sparse: SparseMode,
    scale: float,
    keep_prob: float = 1.0,
    bias: PositionBias | None = None,
) -> Tensor:
    """Attention as [S, B, N * E]; K key heads divide N query heads. With a bias the last query stands at the last key."""
    q, k, v = (x.flatten(2) for x in (q_SBND, k_TBKD, v_TBKE))
    how = _arguments(sparse, scale, keep_prob, (q.shape[0], k.shape[0]), q.device)
    if bias is not None:
        how |= _matrix(bias, sparse, q, k) if bias.matrix else _slopes(bias, q.device, k.shape[0] - q.shape[0])
    return fusion_attention(q, k, v, q_SBND.shape[2], "SBH", **how)[0]


def attend_packed(
    q_TND: Tensor,
    k_TKD: Tensor,
    v_TKE: Tensor,
    ends: tuple[list[int], list[int]],
    sparse: SparseMode,
    scale: float,
    keep_prob: float = 1.0,
    bias: PositionBias | None = None,
) -> Tensor:
    """Attention within each of the packed sequences that end at ``ends`` (of queries, of keys), as [T, N, E].

    Of a bias its slopes are taken; queries and keys of a sequence are counted from its start.
    """
    how = _arguments(sparse, scale, keep_prob, None, q_TND.device)
    if bias is not None:
        how |= _slopes(bias, q_TND.device)
    how |= {"actual_seq_qlen": ends[0], "actual_seq_kvlen": ends[1], "softmax_layout": "TND"}
    return fusion_attention(q_TND, k_TKD, v_TKE, q_TND.shape[1], "TND", **how)[0]


def _arguments(
    sparse: SparseMode, scale: float, keep_prob: float, size: tuple[int, int] | None, device: torch.device
) -> dict[str, Any]:
    """Give the keyword arguments beside the tensors; a full mask is expanded to its ``size`` of queries and keys."""
    mask = sparse.mask if sparse.mode in FULL_MASK else compressed_mask(device)
    if sparse.mode in FULL_MASK and mask is not None and size is not None:
        mask = mask.expand(*mask.shape[:-2], *size)
    window = {"sparse_mode": sparse.mode, "pre_tokens": sparse.before, "next_tokens": sparse.after}
    return {"atten_mask": mask, "scale": scale, "keep_prob": keep_prob, **window}


def _slopes(bias: PositionBias, device: torch.device, start: int = 0) -> dict[str, Any]:
    """The bias from slopes; ``start`` is the place of the first query among the keys."""
    return {"pse": bias.slopes_on(device), "pse_type": 3 if bias.form == "root" else 2, "q_start_idx": [start]}


def _matrix(bias: PositionBias, sparse: SparseMode, q: Tensor, k: Tensor) -> dict[str, Any]:
    """The bias as values, of the last rows only where the operator continues them upwards."""
    few = sparse.mode == CAUSAL and q.shape[0] == k.shape[0]
    rows = min(q.shape[0], COMPRESSED_ROWS) if few else q.shape[0]
    return {"pse": bias.values(rows, k.shape[0], q.device, q.dtype)[None], "pse_type": 0}
