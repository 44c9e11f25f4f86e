"""Tiles cover exactly what is visible, each pair once, and make few rectangles."""

import random
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mindspeed.context_parallel.layout import contiguous, nested, zigzag
from mindspeed.context_parallel.tiles import Tile, tiles, together


def painted(found: list[Tile], queries: int, keys: int) -> torch.Tensor:
    """How often each pair of a query and a key is in a tile."""
    canvas = torch.zeros(queries, keys, dtype=torch.int64)
    for tile in found:
        (top, bottom), (left, right) = tile.rows, tile.columns
        seen = torch.ones(bottom - top, right - left, dtype=torch.int64)
        canvas[top:bottom, left:right] += seen.tril(right - left - (bottom - top)) if tile.causal else seen
    return canvas


def apart(found: list[Tile]) -> list[Tile]:
    """The tiles of calls that compute packed documents together."""
    tiles = []
    for whole, ends in together(found, True, False):
        (top, bottom), (left, right) = whole.rows, whole.columns
        lists = ends or ([bottom - top], [right - left])
        spans = [
            [(start + a, start + b) for a, b in pairwise([0, *each])] for start, each in zip((top, left), lists, strict=True)
        ]
        tiles += [Tile(rows, columns, whole.causal, 0) for rows, columns in zip(*spans, strict=True)]
    return tiles


def expected(queries: list[int], keys: list[int], causal: bool, ends: list[int]) -> torch.Tensor:
    document = {token: number for number, (start, end) in enumerate(pairwise([0, *ends])) for token in range(start, end)}
    rows = [[(not causal or k <= q) and (not ends or document[q] == document[k]) for k in keys] for q in queries]
    return torch.tensor(rows, dtype=torch.int64).view(len(queries), len(keys))


LAYOUTS = {"contiguous": contiguous, "zigzag": zigzag, "nested": lambda n: nested(zigzag(n), 2)}


@given(
    kind=st.sampled_from(sorted(LAYOUTS)),
    ranks=st.integers(1, 4),
    size=st.integers(1, 3),
    causal=st.booleans(),
    join=st.booleans(),
    cuts=st.sets(st.integers(1, 30), max_size=6),
    packed=st.booleans(),
    data=st.data(),
)
def test_the_tiles_of_a_block_are_what_is_visible(kind, ranks, size, causal, join, cuts, packed, data) -> None:
    layout = LAYOUTS[kind](ranks)
    length = layout.count * size
    ends = [*sorted(cut for cut in cuts if cut < length), length] if packed else []
    mine, other = (data.draw(st.integers(0, layout.ranks - 1)) for _ in range(2))
    q, k = layout.spans(mine, length), layout.spans(other, length)
    tokens = [[token for span in spans for token in range(*span)] for spans in (q, k)]
    found = tiles(q, k, causal, ends, join)
    assert torch.equal(painted(found, *map(len, tokens)), expected(*tokens, causal, ends))
    assert torch.equal(painted(apart(found), *map(len, tokens)), expected(*tokens, causal, ends))
    if not join:
        assert all(tile.start == tokens[0][tile.rows[0]] - tokens[1][tile.columns[0]] for tile in found)


@pytest.mark.parametrize(
    ("mine", "other", "tile"),
    [
        (1, 1, Tile((0, 8), (0, 8), True, 4)),
        (1, 0, Tile((0, 8), (0, 4), False, 4)),
        (1, 2, Tile((4, 8), (0, 8), False, 4)),
    ],
)
def test_a_zigzag_block_is_one_tile(mine: int, other: int, tile: Tile) -> None:
    layout = zigzag(4)
    (found,) = tiles(layout.spans(mine, 32), layout.spans(other, 32), causal=True)
    assert found[:3] == tile[:3]


def test_off_diagonal_zigzag_blocks_are_half_a_block_each() -> None:
    layout = zigzag(4)
    for mine in range(4):
        for other in set(range(4)) - {mine}:
            (tile,) = tiles(layout.spans(mine, 64), layout.spans(other, 64), causal=True)
            assert (tile.rows[1] - tile.rows[0]) * (tile.columns[1] - tile.columns[0]) == 16 * 16 // 2


def test_many_documents_are_few_calls() -> None:
    """Of 253 documents in 128 k tokens over eight ranks: what one layer of a ring calls, and one rank with all keys."""
    length, ranks = 1 << 17, 8
    ends = [*sorted(random.Random(3).sample(range(1, length), 252)), length]
    layout = zigzag(ranks)
    spans = [layout.spans(rank, length) for rank in range(ranks)]
    calls = [[len(list(together(tiles(q, k, True, ends), True, False))) for k in spans] for q in spans]
    apart = [sum(len(tiles(q, k, True, ends)) for k in spans) for q in spans]
    assert max(map(sum, calls)) <= 4
    assert max(apart) > 30
    whole = [(0, length)]
    assert len(list(together(tiles(whole, whole, True, ends), True, False))) == 1
