"""Tiles: the visible part of the score matrix of local queries and a block of keys, as few rectangles.

Queries and keys are given as global token ranges in local order. Every range is contiguous, so under a causal mask a pair
of ranges is hidden, or wholly visible, or cut by the diagonal; a document that a query shares with an earlier range of
keys is always the last one that begins there, so documents only narrow a rectangle.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from mindspeed.context_parallel.layout import Span


class Tile(NamedTuple):
    """Local queries ``rows`` against local keys ``columns``.

    ``causal``: the last query sees all keys, each earlier one a key less. ``start``: global number of the first query minus
    that of the first key, which position biases need.
    """

    rows: Span
    columns: Span
    causal: bool
    start: int


def tiles(
    queries: Sequence[Span], keys: Sequence[Span], causal: bool, ends: Sequence[int] = (), join: bool = True
) -> list[Tile]:
    """The visible tiles. ``ends`` are the ends of the documents of the sequence; none means one document.

    With ``join`` tiles that make a larger rectangle become one; a bias by position needs them apart.
    """
    found: list[Tile] = []
    row = 0
    for q in queries:
        column = 0
        for k in keys:
            pairs = _visible(q, k) if causal else [(q, k, False)]
            for rows, columns, cut in pairs if not ends else _within(pairs, ends):
                local_rows = (row + rows[0] - q[0], row + rows[1] - q[0])
                local_columns = (column + columns[0] - k[0], column + columns[1] - k[0])
                found.append(Tile(local_rows, local_columns, cut, rows[0] - columns[0]))
            column += k[1] - k[0]
        row += q[1] - q[0]
    return _joined(found) if join else found


def together(found: Sequence[Tile], packed: bool, biased: bool) -> Iterator[tuple[Tile, tuple[list[int], list[int]] | None]]:
    """Give what one call of attention computes: a tile, or where documents are ``packed`` all tiles that follow one another.

    Beside packed tiles the ends of their documents are given, of queries and of keys, from the start of the first one.
    With a bias by position (``biased``) they begin at one distance of query and key.
    """
    groups: list[list[Tile]] = []
    for tile in found:
        last = groups[-1][-1] if groups else None
        follows = last and (last.rows[1], last.columns[1], last.causal) == (tile.rows[0], tile.columns[0], tile.causal)
        if packed and last and follows and (not biased or last.start == tile.start):
            groups[-1].append(tile)
        else:
            groups.append([tile])
    for group in groups:
        first, last = group[0], group[-1]
        whole = first._replace(rows=(first.rows[0], last.rows[1]), columns=(first.columns[0], last.columns[1]))
        ends = [tile.rows[1] - first.rows[0] for tile in group], [tile.columns[1] - first.columns[0] for tile in group]
        yield whole, ends if len(group) > 1 else None


_Pair = tuple[Span, Span, bool]
"""Global queries, global keys, and whether the diagonal ends in their last corner."""


def _visible(q: Span, k: Span) -> Iterator[_Pair]:
    """The causal part of a pair of ranges: at most a triangle and a rectangle below it."""
    first, last = max(q[0], k[0]), min(q[1], k[1])
    if k[1] <= q[0]:
        yield q, k, False
    elif first < last:
        yield (first, last), (k[0], last), True
        if last < q[1]:
            yield (last, q[1]), k, False


def _within(pairs: Iterable[_Pair], ends: Sequence[int]) -> Iterator[_Pair]:
    """The parts of pairs in which query and key are of one document."""
    for q, k, cut in pairs:
        number = bisect_right(ends, max(q[0], k[0]))
        while number < len(ends) and (start := ends[number - 1] if number else 0) < min(q[1], k[1]):
            rows, columns = (max(q[0], start), min(q[1], ends[number])), (max(k[0], start), min(k[1], ends[number]))
            if rows[0] < rows[1] and columns[0] < columns[1]:
                yield rows, columns, cut
            number += 1


def _joined(found: list[Tile]) -> list[Tile]:
    """Tiles that touch made one: first side by side, then one above the other."""
    beside: list[Tile] = []
    for tile in found:
        last = beside[-1] if beside else None
        if last and not last.causal and last.rows == tile.rows and last.columns[1] == tile.columns[0]:
            beside[-1] = last._replace(columns=(last.columns[0], tile.columns[1]), causal=tile.causal)
        else:
            beside.append(tile)
    below: list[Tile] = []
    for tile in beside:
        last = below[-1] if below else None
        if last and last.rows[1] == tile.rows[0] and last.columns[0] == tile.columns[0] and _one_shape(last, tile):
            below[-1] = last._replace(rows=(last.rows[0], tile.rows[1]), columns=tile.columns)
        else:
            below.append(tile)
    return below


def _one_shape(upper: Tile, lower: Tile) -> bool:
    """Tell whether two tiles, one above the other, are one rectangle or one causal shape."""
    if upper.causal != lower.causal:
        return False
    if not upper.causal:
        return upper.columns == lower.columns
    return upper.columns[1] - upper.rows[1] == lower.columns[1] - lower.rows[1]
