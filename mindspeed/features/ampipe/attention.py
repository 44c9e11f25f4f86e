"""Self-attention of Megatron in two parts: the heads of the whole sequence, then its rows chunk by chunk.

S queries of B samples, T tensor-parallel ranks that share them, M chunks; N query heads, K key heads, D their width. Chunk c
has slice c of the rows of every rank, so that under sequence parallelism no row changes its rank: T segments of S / (M x T)
queries.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from mindspeed import plugins as ms
from mindspeed.problems import Fix


class Heads(NamedTuple):
    """The arguments that Megatron has for the core attention: queries [S, B, N, D], keys and values [S, B, K, D]."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    options: dict[str, Any]


class _TakeHeads(torch.nn.Module):
    """Stand for a core attention, and return its arguments; keys and values in order, so that no chunk copies its part."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any) -> Heads:
        return Heads(query, key.contiguous(), value.contiguous(), attention_mask, options)


class _KeepHeads(torch.nn.Module):
    """Stand for the projection behind a core attention, and return its input."""

    def forward(self, heads: Heads) -> tuple[Heads, None]:
        return heads, None


def heads_of(attention: Any, x_SBH: Tensor, mask: Tensor | None, **positions: Any) -> Heads:
    """Run Megatron's own attention up to the scores, with its rotary embedding, on the whole sequence."""
    until_scores = copy.copy(attention)
    until_scores.__dict__["_modules"] = {**attention._modules, "core_attention": _TakeHeads(), "linear_proj": _KeepHeads()}
    heads: Heads = until_scores(x_SBH, attention_mask=mask, **positions)[0]
    return heads


@dataclass(frozen=True, slots=True)
class Segment:
    """Queries [s, B, N, D] of consecutive rows, of which the first is row ``start`` of the sequence."""

    query: Tensor
    start: int


def segments_of(query: Tensor, ranks: int, chunks: int) -> list[list[Segment]]:
    """Cut queries into the segments of each chunk, one of every rank's rows."""
    length = query.shape[0] // (ranks * chunks)
    cut = [share.unbind(0) for share in query.reshape(ranks, chunks, length, *query.shape[1:]).unbind(0)]
    return [[Segment(cut[rank][chunk], (rank * chunks + chunk) * length) for rank in range(ranks)] for chunk in range(chunks)]


def attend(core: Any, heads: Heads, segments: list[Segment]) -> Tensor:
    """Return the outputs of segments one after another; with causal attention later keys are skipped."""
    causal = is_causal(core, heads.mask)
    answers = [_attend_segment(core, heads, segment, causal) for segment in segments]
    return torch.cat(answers) if len(answers) > 1 else answers[0]


def _attend_segment(core: Any, heads: Heads, segment: Segment, causal: bool) -> Tensor:
    query, start = segment.query, segment.start
    end = start + query.shape[0]
    seen = end if causal else heads.key.shape[0]
    mask = heads.mask
    if mask is not None:
        mask = mask[..., start:end, :seen]
    elif causal and not getattr(core, "knows_documents", False):  # the attribute of modules whose operator counts from the end
        mask = torch.ones((1, 1, end - start, seen), dtype=torch.bool, device=query.device).triu(start + 1)
    answers: Tensor = core(query, heads.key[:seen], heads.value[:seen], mask, **heads.options)
    return answers


def is_causal(core: Any, mask: Tensor | None) -> bool:
    """Return whether a query sees no later key. Raises MindSpeedError where attention is neither causal nor full."""
    kind = core.attn_mask_type
    if kind == AttnMaskType.causal:
        return True
    if kind == AttnMaskType.no_mask or (kind == AttnMaskType.padding and mask is None):
        return False
    text = f"ampipe: an attention layer has a mask of type {kind.name}, but chunks support only causal and full attention"
    raise ms.MindSpeedError([ms.Problem("MS304", text, ("ampipe",), fix=Fix.remove_feature("ampipe"))])
