"""The order of tokens that a mask is spread in: it is an order, it is never worse, and it finds what belongs together."""

from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mindspeed.context_parallel.attention_mask import make_mask
from mindspeed.context_parallel.layout import contiguous
from mindspeed.context_parallel.mask_rules import MaskRule
from mindspeed.features.adaptive_cp.attention import best_layout, cost, grid
from mindspeed.features.adaptive_cp.masks import RuleMask, WholeMask
from tests.context_parallel.shards import causal


@st.composite
def masks(draw: st.DrawFn) -> tuple[Tensor, int, int]:
    """A mask of pieces of any density, ranks whose shares are equal, and a number of pieces to look at."""
    ranks, share, piece = draw(st.integers(1, 5)), draw(st.integers(1, 6)), draw(st.integers(1, 3))
    tokens = ranks * share * piece
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    hidden = torch.rand(ranks * share, ranks * share, generator=generator) < draw(st.floats(0, 1))
    mask = hidden.repeat_interleave(piece, 0).repeat_interleave(piece, 1)
    return mask, ranks, draw(st.integers(1, tokens))


@given(masks())
def test_every_token_is_held_once_and_comes_back(case: tuple[Tensor, int, int]) -> None:
    mask, ranks, pieces = case
    layout = best_layout(mask, ranks, pieces)
    tokens = torch.arange(mask.shape[0])
    shares = [layout.take(tokens, rank) for rank in range(ranks)]
    assert {len(share) for share in shares} == {len(tokens) // ranks}
    assert torch.equal(layout.restore(shares), tokens)
    assert torch.equal(torch.cat(shares).sort().values, tokens)


@given(masks())
def test_an_order_is_taken_only_for_balance_or_for_fewer_blocks(case: tuple[Tensor, int, int]) -> None:
    mask, ranks, pieces = case
    layout = best_layout(mask, ranks, pieces)
    found, before = (cost(grid(WholeMask(mask).pairs(one.count), one)) for one in (layout, contiguous(ranks)))
    pairs = int((~mask).sum())
    assert layout == contiguous(ranks) or found.weighted(pairs, ranks) < before.weighted(pairs, ranks)
    assert layout == contiguous(ranks) or found.busiest < before.busiest or found.blocks <= before.blocks


@given(masks())
def test_the_grid_of_an_order_is_that_of_the_reordered_mask(case: tuple[Tensor, int, int]) -> None:
    mask, ranks, pieces = case
    layout = best_layout(mask, ranks, pieces)
    rows = [layout.take(mask, rank) for rank in range(ranks)]
    blocks = [[not layout.take(row, rank, 1).all() for rank in range(ranks)] for row in rows]
    assert (grid(WholeMask(mask).pairs(layout.count), layout) > 0).tolist() == blocks


def interleaved(tokens: int, stride: int) -> Tensor:
    """Causal, and each token sees only those that have its remainder."""
    place = torch.arange(tokens) % stride
    return causal(tokens) | (place[:, None] != place[None, :])


@pytest.mark.parametrize(("tokens", "ranks"), [(64, 4), (60, 3), (28, 2)])
def test_tokens_of_interleaved_documents_are_brought_together(tokens: int, ranks: int) -> None:
    mask = interleaved(tokens, ranks)
    assert cost(WholeMask(mask).pairs(ranks)).blocks == ranks * (ranks + 1) // 2
    layout = best_layout(mask, ranks, tokens)
    assert (grid(WholeMask(mask).pairs(layout.count), layout) > 0).tolist() == torch.eye(ranks, dtype=torch.bool).tolist()


def test_pieces_that_nothing_joins_but_two_marked_ones_are_clustered() -> None:
    """Two kinds of pieces that see all of their kind, shuffled: each kind fills one rank."""
    kind = torch.tensor([0, 1, 1, 0, 1, 0, 0, 1])
    mask = (kind[:, None] != kind[None, :]).repeat_interleave(2, 0).repeat_interleave(2, 1)
    layout = best_layout(mask, 2, 8)
    assert sorted(layout.pieces) == [(0, 3, 5, 6), (1, 2, 4, 7)]


def test_a_causal_mask_is_balanced_as_in_zig_zag() -> None:
    layout = best_layout(causal(64), 4, 64)
    pairs = grid(WholeMask(causal(64)).pairs(layout.count), layout)
    assert layout.count == 8
    assert pairs.sum(1).tolist() == [520] * 4


@pytest.mark.parametrize(
    ("tokens", "ranks", "inner", "pieces"), [(64, 4, 1, 16), (60, 4, 1, 12), (14, 2, 1, 2), (64, 2, 2, 16)]
)
def test_pieces_are_as_many_as_fit(tokens: int, ranks: int, inner: int, pieces: int) -> None:
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(pieces, generator=generator)
    kinds = (torch.arange(pieces) * ranks // pieces)[order]
    mask = (kinds[:, None] != kinds[None, :]).repeat_interleave(tokens // pieces, 0).repeat_interleave(tokens // pieces, 1)
    layout = best_layout(mask, ranks, 16 if tokens != 14 else 6, inner)
    assert layout.count == pieces
    assert tokens % (layout.count * inner) == 0


RULES = st.one_of(
    st.just(MaskRule()),
    st.integers(1, 30).map(lambda width: MaskRule("sliding-window", width=width)),
    st.integers(1, 30).map(lambda prefix: MaskRule("prefix", prefix=prefix)),
)


@given(RULES, st.integers(1, 6), st.integers(1, 5), st.randoms(use_true_random=False))
def test_blocks_by_a_rule_are_those_of_its_whole_mask(rule: MaskRule, count: int, size: int, random: Random) -> None:
    tokens = count * size
    whole, ruled = WholeMask(make_mask(rule, tokens, torch.device("cpu"))), RuleMask(rule, tokens)
    assert torch.equal(ruled.pairs(count), whole.pairs(count))
    some = [torch.tensor(sorted(random.sample(range(tokens), random.randint(1, tokens)))) for _ in range(2)]
    assert torch.equal(ruled.block(*some), whole.block(*some))
