"""Attention chunk by chunk against attention over the whole sequence, in plain torch."""

from typing import Any

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from mindspeed.features.ampipe.attention import Heads, attend, segments_of

LENGTH, BATCH, HEADS, KEYS, WIDTH = 16, 2, 4, 2, 8


class Core:
    """Core attention of Megatron in plain torch: a mask hides what it is true for, else a causal one sees by equal numbers."""

    def __init__(self, kind: AttnMaskType) -> None:
        self.attn_mask_type = kind

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
        key, value = (x.repeat_interleave(HEADS // KEYS, 2) for x in (key, value))
        scores = torch.einsum("sbnd,tbnd->bnst", query, key) / WIDTH**0.5
        if mask is None and self.attn_mask_type == AttnMaskType.causal:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        if mask is not None:
            scores = scores.masked_fill(mask, -torch.inf)
        return torch.einsum("bnst,tbnd->sbnd", scores.softmax(-1), value).flatten(2)


def heads(mask: Tensor | None) -> Heads:
    draw = torch.Generator().manual_seed(1)
    shapes = [(LENGTH, BATCH, count, WIDTH) for count in (HEADS, KEYS, KEYS)]
    return Heads(*(torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes), mask, {})


def in_order(answers: list[Tensor], ranks: int) -> Tensor:
    """Answers [S, B, H] of chunks, each with one segment of every rank, in the order of the sequence."""
    by_rank = [torch.cat([answer.chunk(ranks)[rank] for answer in answers]) for rank in range(ranks)]
    return torch.cat(by_rank)


@pytest.mark.parametrize("chunks", [2, 4])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("given", [False, True], ids=["no mask", "mask"])
@pytest.mark.parametrize("kind", [AttnMaskType.causal, AttnMaskType.no_mask])
def test_chunks_see_the_keys_of_the_whole_sequence(kind: AttnMaskType, given: bool, ranks: int, chunks: int) -> None:
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1) if given and kind == AttnMaskType.causal else None
    core, whole = Core(kind), heads(mask)
    answers = [attend(core, whole, segments) for segments in segments_of(whole.query, ranks, chunks)]
    expected = core(whole.query, whole.key, whole.value, mask)
    torch.testing.assert_close(in_order(answers, ranks), expected, rtol=1e-12, atol=1e-12)


class Recorder:
    """Core attention by an operator that aligns the last query with the last key; records sizes and masks."""

    attn_mask_type, knows_documents = AttnMaskType.causal, True

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, Tensor | None]] = []

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        self.calls.append((query.shape[0], key.shape[0], mask))
        return query.flatten(2)


def test_an_operator_that_counts_from_the_end_gets_no_mask_and_no_later_key() -> None:
    core, whole = Recorder(), heads(None)
    for segments in segments_of(whole.query, 2, 2):
        attend(core, whole, segments)
    assert core.calls == [(4, 4, None), (4, 12, None), (4, 8, None), (4, 16, None)]
