"""Panels of pictures and tables of bytes, from the layouts, rounds, tiles and closed forms that the algorithms go by."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mindspeed.context_parallel.costs import Attention, SentBytes
from mindspeed.context_parallel.layout import Layout, Span
from mindspeed.context_parallel.ring import Rounds
from mindspeed.context_parallel.tiles import tiles
from mindspeed.workbench.pages.markdown import table
from tools.docs.drawing import Arrow, Box, Mark, Matrix, Timeline

Seen = list[tuple[float, float, float, float, bool]]


def pieces_strip(layout: Layout, title: str = "Pieces of the sequence, and the rank that holds each") -> Matrix:
    """The pieces in the order of the sequence."""
    owner = holders(layout)
    cells = {(0, piece): Mark(str(rank), rank) for piece, rank in owner.items()}
    return Matrix(title, ["rank"], [str(piece) for piece in range(layout.count)], cells)


def holders(layout: Layout) -> dict[int, int]:
    """The rank of each piece."""
    return {piece: rank for rank, pieces in enumerate(layout.pieces) for piece in pieces}


def scores(layout: Layout, text: Callable[[int, int], str], title: str) -> Matrix:
    """Which pairs of pieces are visible under a causal mask, in the colour of the rank that computes them.

    ``text`` is given the ranks that hold the queries and the keys.
    """
    owner, pieces = holders(layout), range(layout.count)
    pairs = [(query, key) for query in pieces for key in range(query + 1)]
    cells = {(q, k): Mark(text(owner[q], owner[k]), owner[q], cut=q == k) for q, k in pairs}
    return Matrix(title, [str(piece) for piece in pieces], [str(piece) for piece in pieces], cells)


def seen(layout: Layout, rank: int, keys: Sequence[Span]) -> Seen:
    """What queries of a rank see of keys under a causal mask, as parts of a square."""
    mine = layout.spans(rank, layout.count * 2)
    tall, wide = (sum(end - begin for begin, end in spans) for spans in (mine, keys))
    made: Seen = []
    for tile in tiles(mine, keys, causal=True, join=False):
        (top, bottom), (left, right) = tile.rows, tile.columns
        made.append((left / wide, top / tall, (right - left) / wide, (bottom - top) / tall, tile.causal))
    return made


def ring_timeline(layout: Layout, rounds: Rounds, title: str) -> Timeline:
    """The keys that each rank has at each step and what it sees of them, with the transfers of the rounds."""
    ranks, boxes, arrows = range(rounds.ranks), {}, []
    for rank in ranks:
        for step in ranks:
            block = rounds.block(rank, step)
            boxes[rank, step] = Box(f"keys {block}", block, seen(layout, rank, layout.spans(block, layout.count * 2)))
            for hop in rounds.hops(rank, step):
                arrows.append(Arrow((rank, step), (hop.to, hop.due), "near" if hop.due == step + 1 else "far"))
    return Timeline(title, [f"step {step}" for step in ranks], boxes, arrows, rounds.ranks)


def step_of(rounds: Rounds, rank: int, block: int) -> int:
    """The step at which a rank has a block."""
    return next(step for step in range(rounds.ranks) if rounds.block(rank, step) == block)


def bytes_lines(sent: Callable[[Attention, int], SentBytes], ranks: Sequence[int] = (2, 4)) -> tuple[str, ...]:
    """Lines of a table: what a rank sends for a layer by the closed form, with as many key heads as query heads and fewer."""
    models = {f"{groups} key heads": Attention(4096, 32, groups, 128, 128, 2) for groups in (32, 8)}
    rows = [
        (str(size), name, *(f"{number / 2**20:g}" for number in (found.forward, found.backward, found.both)))
        for size in ranks
        for name, found in ((name, sent(model, size)) for name, model in models.items())
    ]
    what = "MiB that one rank sends for one layer (32 heads of width 128, bf16, 4,096 tokens per rank):"
    return (what, "", *table(("ranks", "", "forward", "backward", "both"), rows))
