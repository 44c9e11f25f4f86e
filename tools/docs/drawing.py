"""Pictures of who holds what and what travels when, as SVG: strips, matrices and timelines of ranks.

A picture is legible on light and on dark pages, has a title and a description for readers that do not see, and the same values
give the same text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol
from xml.sax.saxutils import escape

COLOURS: Final = ("#9ecbff", "#ffd479", "#a8e6a3", "#f5b0cb", "#d0bfff", "#ffbfa0", "#99e2d8", "#d9d9d9")
"""Of ranks, all light: what stands in them is dark on every page."""
_STYLE: Final = """
svg { font: 13px system-ui, sans-serif; }
.page { fill: #ffffff; } .ink { fill: #24292f; } .head { fill: #24292f; font-weight: 600; }
.in { fill: #1b1f24; text-anchor: middle; } .end { text-anchor: end; } .mid { text-anchor: middle; }
.box { stroke: #57606a; stroke-width: 1; } .empty { fill: none; stroke: #8c959f; stroke-dasharray: 2 3; }
.go { stroke: #57606a; fill: none; stroke-width: 1.6; } .tip { fill: #57606a; } .glyph { fill: #1b1f24; fill-opacity: 0.65; }
.far, .query { stroke-dasharray: 6 4; } .result { stroke-dasharray: 1.5 3.5; stroke-width: 2; }
@media (prefers-color-scheme: dark) {
.page { fill: #161b22; } .ink, .head { fill: #e6edf3; } .box, .go { stroke: #a5aeb8; } .tip { fill: #a5aeb8; }
}
""".strip()
_EDGE: Final = 16
_HEAD: Final = 26
_LABEL: Final = 62

Kind = Literal["near", "far", "query", "result"]
Lines = Iterator[str]


class Panel(Protocol):
    """A part of a picture."""

    @property
    def size(self) -> tuple[int, int]:
        """Width and height."""

    def draw(self, x: int, y: int) -> Lines:
        """The elements, with the upper left corner at the point."""


@dataclass(frozen=True, slots=True)
class Mark:
    """What stands in a cell, in the colour of a rank. ``cut``: only the half below the diagonal."""

    text: str
    rank: int
    cut: bool = False


@dataclass(frozen=True, slots=True)
class Matrix:
    """Cells by (row, column), with labels of rows and columns."""

    title: str
    rows: Sequence[str]
    columns: Sequence[str]
    cells: Mapping[tuple[int, int], Mark]
    side: int = 26

    @property
    def size(self) -> tuple[int, int]:
        head = _LABEL + self.side * len(self.columns)
        return max(head, _width(self.title)), _HEAD + 18 + self.side * len(self.rows)

    def draw(self, x: int, y: int) -> Lines:
        yield _text(x, y + 14, self.title, "head")
        left, top = x + _LABEL, y + _HEAD + 18
        for column, label in enumerate(self.columns):
            yield _text(left + column * self.side + self.side // 2, top - 6, label, "ink mid")
        for row, label in enumerate(self.rows):
            yield _text(left - 8, top + row * self.side + self.side // 2 + 5, label, "ink end")
        for (row, column), mark in sorted(self.cells.items()):
            yield from self._cell(left + column * self.side, top + row * self.side, mark)

    def _cell(self, x: int, y: int, mark: Mark) -> Lines:
        side, fill = self.side, COLOURS[mark.rank % len(COLOURS)]
        if mark.cut:
            yield f'<path class="box" d="M{x} {y}v{side}h{side}z" fill="{fill}"/>'
            yield _text(x + side // 3, y + side - 4, mark.text, "in")
        else:
            yield f'<rect class="box" x="{x}" y="{y}" width="{side}" height="{side}" fill="{fill}"/>'
            yield _text(x + side // 2, y + side // 2 + 5, mark.text, "in")


@dataclass(frozen=True, slots=True)
class Box:
    """What a rank has or does at a time, in the colour of rank ``rank``.

    ``seen`` are the rectangles and triangles (x, y, width, height, cut) of a unit square that are computed.
    """

    text: str
    rank: int
    seen: Sequence[tuple[float, float, float, float, bool]] = ()


@dataclass(frozen=True, slots=True)
class Arrow:
    """From a (rank, column) to another: keys to a ``near`` or ``far`` rank, a ``query``, or a ``result`` on its way back."""

    begin: tuple[int, int]
    end: tuple[int, int]
    kind: Kind = "near"


@dataclass(frozen=True, slots=True)
class Timeline:
    """Ranks from top to bottom, or what has one of ``names``, time from left to right."""

    title: str
    columns: Sequence[str]
    boxes: Mapping[tuple[int, int], Box]
    arrows: Sequence[Arrow] = ()
    ranks: int = 4
    width: int = 104
    gap: int = 56
    height: int = 40
    names: Sequence[str] = ()

    @property
    def size(self) -> tuple[int, int]:
        across = _LABEL + len(self.columns) * (self.width + self.gap) - self.gap
        return max(across, _width(self.title)), _HEAD + 18 + self.ranks * (self.height + 14) - 14

    def draw(self, x: int, y: int) -> Lines:
        yield _text(x, y + 14, self.title, "head")
        left, top = x + _LABEL, y + _HEAD + 18
        for column, label in enumerate(self.columns):
            yield _text(left + column * (self.width + self.gap) + self.width // 2, top - 6, label, "ink mid")
        for rank, name in enumerate(self.names or [f"rank {rank}" for rank in range(self.ranks)]):
            yield _text(left - 8, top + rank * (self.height + 14) + self.height // 2 + 5, name, "ink end")
        for arrow in self.arrows:
            (begin_x, begin_y), (end_x, end_y) = self._corner(left, top, arrow.begin), self._corner(left, top, arrow.end)
            begin_y, end_y = begin_y + self.height // 2, end_y + self.height // 2
            yield _line(begin_x + self.width, begin_y, end_x - 3, end_y, arrow.kind)
        for column in range(len(self.columns)):
            for rank in range(self.ranks):
                yield from self._box(*self._corner(left, top, (rank, column)), self.boxes.get((rank, column)))

    def _corner(self, left: int, top: int, place: tuple[int, int]) -> tuple[int, int]:
        return left + place[1] * (self.width + self.gap), top + place[0] * (self.height + 14)

    def _box(self, x: int, y: int, box: Box | None) -> Lines:
        at = f'x="{x}" y="{y}" width="{self.width}" height="{self.height}" rx="5"'
        if box is None:
            yield f'<rect class="empty" {at}/>'
            return
        yield f'<rect class="box" {at} fill="{COLOURS[box.rank % len(COLOURS)]}"/>'
        side = self.height - 12 if box.seen else 0
        if box.seen:
            yield f'<rect class="box" x="{x + 6}" y="{y + 6}" width="{side}" height="{side}" fill="#ffffff"/>'
        for across, down, width, height, cut in box.seen:
            w, h = _number(width * side), _number(height * side)
            at = f"M{_number(x + 6 + across * side)} {_number(y + 6 + down * side)}"
            yield f'<path class="glyph" d="{at}{f"v{h}h{w}z" if cut else f"h{w}v{h}h-{w}z"}"/>'
        yield _text(x + (self.width + side) // 2 + (3 if side else 0), y + self.height // 2 + 5, box.text, "in")


@dataclass(frozen=True, slots=True)
class Lanes:
    """What is busy when: a lane for each of ``busy``, with intervals in cells of time."""

    title: str
    busy: Mapping[str, Sequence[Sequence[int]]]
    cells: int = 240
    cell: int = 3
    height: int = 20

    @property
    def size(self) -> tuple[int, int]:
        return max(self._label + self.cells * self.cell, _width(self.title)), _HEAD + len(self.busy) * (self.height + 6)

    @property
    def _label(self) -> int:
        return 7 * max(map(len, self.busy)) + 16

    def draw(self, x: int, y: int) -> Lines:
        yield _text(x, y + 14, self.title, "head")
        for number, (name, intervals) in enumerate(self.busy.items()):
            top = y + _HEAD + number * (self.height + 6)
            yield _text(x + self._label - 8, top + self.height // 2 + 5, name, "ink end")
            for begin, end in intervals:
                left, width = x + self._label + begin * self.cell, (end - begin) * self.cell
                at = f'x="{left}" y="{top}" width="{width}" height="{self.height}"'
                yield f'<rect {at} fill="{COLOURS[number % len(COLOURS)]}"/>'


@dataclass(frozen=True, slots=True)
class Node:
    """A box with a name, and a note below it; ``rank`` is its colour."""

    text: str
    note: str
    rank: int


@dataclass(frozen=True, slots=True)
class Flow:
    """Columns of nodes, and lines from a (column, row) to another column's."""

    columns: Sequence[tuple[str, Sequence[Node]]]
    edges: Sequence[tuple[tuple[int, int], tuple[int, int]]]
    gap: int = 56
    height: int = 40

    @property
    def size(self) -> tuple[int, int]:
        rows = max(len(nodes) for _, nodes in self.columns)
        return sum(self._widths) + self.gap * (len(self.columns) - 1), _HEAD + rows * (self.height + 12) - 12

    @property
    def _widths(self) -> list[int]:
        texts = [[title, *(text for node in nodes for text in (node.text, node.note))] for title, nodes in self.columns]
        return [7 * max(map(len, column)) + 20 for column in texts]

    def draw(self, x: int, y: int) -> Lines:
        lefts = [x + sum(self._widths[:number]) + self.gap * number for number in range(len(self.columns))]
        for (column, row), (end_column, end_row) in self.edges:
            begin = lefts[column] + self._widths[column]
            yield _line(begin, self._middle(y, row), lefts[end_column] - 3, self._middle(y, end_row), "near")
        for left, width, (title, nodes) in zip(lefts, self._widths, self.columns, strict=True):
            yield _text(left, y + 14, title, "head")
            for row, node in enumerate(nodes):
                top, fill = self._middle(y, row) - self.height // 2, COLOURS[node.rank % len(COLOURS)]
                yield f'<rect class="box" x="{left}" y="{top}" width="{width}" height="{self.height}" rx="5" fill="{fill}"/>'
                yield _text(left + width // 2, top + (17 if node.note else 25), node.text, "in")
                if node.note:
                    yield _text(left + width // 2, top + 33, node.note, "in")

    def _middle(self, y: int, row: int) -> int:
        return y + _HEAD + row * (self.height + 12) + self.height // 2


@dataclass(frozen=True, slots=True)
class Picture:
    """``name`` is the file's, ``text`` says in words what the rows of panels show."""

    name: str
    title: str
    text: str
    panels: Sequence[Sequence[Panel]]


def svg(picture: Picture) -> str:
    """The picture as the text of a file."""
    drawn: list[str] = []
    width, y = _width(picture.title), _EDGE
    for row in picture.panels:
        x = _EDGE
        for panel in row:
            drawn += panel.draw(x, y)
            x += panel.size[0] + 40
        width = max(width, x - 40 + _EDGE)
        y += max(panel.size[1] for panel in row) + 22
    height = y - 22 + _EDGE
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            'role="img" aria-labelledby="title text">',
            f'<title id="title">{escape(picture.title)}</title>',
            f'<desc id="text">{escape(picture.text)}</desc>',
            f"<style>{_STYLE}</style>",
            f'<rect class="page" width="{width}" height="{height}" rx="8"/>',
            *drawn,
            "</svg>\n",
        ]
    )


def _text(x: int, y: int, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x}" y="{y}">{escape(text)}</text>'


def _line(x: int, y: int, end_x: int, end_y: int, kind: Kind) -> str:
    """A line with its tip, which points the way that the line goes."""
    across, down = end_x - x, end_y - y
    length = (across**2 + down**2) ** 0.5
    back_x, back_y = end_x - 9 * across / length, end_y - 9 * down / length
    side_x, side_y = 4 * down / length, 4 * across / length
    tip = [(end_x, end_y), (back_x + side_x, back_y - side_y), (back_x - side_x, back_y + side_y)]
    points = " ".join(f"{_number(a)},{_number(b)}" for a, b in tip)
    line = f'<path class="go {kind}" d="M{x} {y}L{_number(back_x)} {_number(back_y)}"/>'
    return f'{line}<polygon class="tip" points="{points}"/>'


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _width(text: str) -> int:
    """About what a title takes, in pixels."""
    return 8 * len(text)
