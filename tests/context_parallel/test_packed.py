"""Packed sequences cut for ranks: every layout's shares make the whole row again, with the rotary embedding of one rank."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_thd as stock
from torch import Tensor

from mindspeed.context_parallel.documents import ends_of_packed
from mindspeed.context_parallel.layout import Layout, contiguous, nested, zigzag
from mindspeed.context_parallel.packed import rope_function_of_packed, slicer_of_packed
from mindspeed.problems import MindSpeedError

TOKENS, HEADS, WIDTH = 24, 2, 8
LAYOUTS = [zigzag(1), zigzag(2), zigzag(3), contiguous(4), nested(zigzag(2), 2)]


@dataclass
class Group:
    """One rank of a group that nothing is sent in."""

    place: int
    ranks: int

    def rank(self) -> int:
        return self.place

    def size(self) -> int:
        return self.ranks


def table(positions: int) -> Tensor:
    return torch.outer(torch.arange(positions).float(), torch.logspace(0, -3, WIDTH // 2)).repeat(1, 2)[:, None, None]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: str(layout.pieces))
@pytest.mark.parametrize("ends", [[1, 2, 9, 17, 24], [24], [3, 19]], ids=str)
def test_positions_begin_anew_with_each_sequence_wherever_ranks_end(layout: Layout, ends: list[int]) -> None:
    x = torch.randn(TOKENS, HEADS, WIDTH, generator=torch.Generator().manual_seed(0))
    starts = torch.tensor([0, *ends], dtype=torch.int32)
    longest = int(starts.diff().max())
    rope = rope_function_of_packed(lambda ranks: layout)
    groups = [Group(rank, layout.ranks) for rank in range(layout.ranks)]
    shares = [rope(layout.take(x, group.rank()), starts, table(longest), cp_group=group) for group in groups]
    expected = stock(x[: ends[-1]], starts, table(longest), cp_group=Group(0, 1))
    torch.testing.assert_close(layout.restore(shares)[: ends[-1]], expected, rtol=0, atol=1e-6)


def test_a_table_of_the_whole_row_says_every_position_itself() -> None:
    x, layout = torch.randn(TOKENS, HEADS, WIDTH), zigzag(2)
    starts = torch.tensor([0, 5, TOKENS])
    rope = rope_function_of_packed(lambda ranks: layout)
    shares = [rope(layout.take(x, rank), starts, table(TOKENS), cp_group=Group(rank, 2)) for rank in range(2)]
    torch.testing.assert_close(layout.restore(shares), stock(x, starts, table(TOKENS), cp_group=Group(0, 1)))


def test_options_of_megatron_0_20_reach_the_rotation_of_a_whole_row(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def rotate(t: Tensor, freqs: Tensor, *_: Any, **options: Any) -> Tensor:
        given.update(options)
        return t

    monkeypatch.setattr("megatron.core.models.common.embeddings.rope_utils._apply_rotary_pos_emb_bshd", rotate)
    rope, options = rope_function_of_packed(zigzag), {"inverse": True, "mla_output_remove_interleaving": True}
    rope(torch.zeros(4, 1, WIDTH), torch.tensor([0, 4]), table(4), max_seqlen=4, cp_group=Group(0, 1), **options)
    assert given == options


def shares_of(layout: Layout, row: Tensor) -> list[tuple[dict[str, Any], Any]]:
    cut = slicer_of_packed(lambda ranks: layout)
    starts = torch.tensor([[0, 5, 20]], dtype=torch.int32)
    return [
        cut({"tokens": row, "labels": None, "max_seqlen": 15}, starts, None, torch.tensor([15]), layout.ranks, rank)
        for rank in range(layout.ranks)
    ]


@pytest.mark.guards(46)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: str(layout.pieces))
def test_every_rank_gets_its_share_of_the_row_and_the_ends_of_all(layout: Layout) -> None:
    row = torch.arange(TOKENS)[None]
    found = shares_of(layout, row)
    assert torch.equal(layout.restore([batch["tokens"] for batch, _ in found], 1), row)
    for batch, packed in found:
        assert (batch["labels"], batch["max_seqlen"]) == (None, 15)
        assert (packed.qkv_format, packed.max_seqlen_q, packed.max_seqlen_kv) == ("thd", 15, 15)
        assert ends_of_packed(packed, "q", TOKENS) == ends_of_packed(packed, "kv", TOKENS) == (5, 20, TOKENS)


def test_a_row_that_is_not_equal_pieces_is_refused() -> None:
    with pytest.raises(MindSpeedError) as refused:
        shares_of(zigzag(2), torch.arange(22)[None])
    assert str(refused.value) == (
        "MS336 a row of packed sequences has 22 tokens, which cannot be split into 4 equal chunks\n"
        "  fix: pad the row to a multiple of 4 tokens; its documents may have any length"
    )


def test_sequences_longer_than_their_row_are_refused() -> None:
    _, packed = shares_of(zigzag(1), torch.arange(TOKENS)[None])[0]
    with pytest.raises(MindSpeedError) as refused:
        ends_of_packed(packed, "q", 16)
    assert str(refused.value) == (
        "MS337 packed sequences end at 20, but their row has 16 tokens\n  fix: give cu_seqlens that match this row"
    )
