"""Pictures as SVG, made of panels, of which `Flow` is the one for plans.

A picture is legible on light and on dark pages, has a title and a description for readers that do not see, and the same values
give the same text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol
from xml.sax.saxutils import escape

COLOURS: Final = ("#9ecbff", "#ffd479", "#a8e6a3", "#f5b0cb", "#d0bfff", "#ffbfa0", "#99e2d8", "#d9d9d9")
"""Of ranks, all light: what stands in them is dark on every page."""
_STYLE: Final = """
.picture { font: 13px system-ui, sans-serif; }
.picture .page { fill: #ffffff; } .picture .ink { fill: #24292f; } .picture .head { fill: #24292f; font-weight: 600; }
.picture .in { fill: #1b1f24; text-anchor: middle; } .picture .small { font-size: 11px; fill-opacity: 0.8; }
.picture .end { text-anchor: end; } .picture .mid { text-anchor: middle; }
.picture .box { stroke: #57606a; stroke-width: 1; }
.picture .empty { fill: none; stroke: #8c959f; stroke-dasharray: 2 3; }
.picture .go { stroke: #57606a; fill: none; stroke-width: 1.6; } .picture .tip { fill: #57606a; }
.picture .glyph { fill: #1b1f24; fill-opacity: 0.65; } .picture .curve { stroke-opacity: 0.55; }
.picture .far, .picture .query { stroke-dasharray: 6 4; }
.picture .result { stroke-dasharray: 1.5 3.5; stroke-width: 2; }
@media (prefers-color-scheme: dark) {
.picture .page { fill: #161b22; } .picture .ink, .picture .head { fill: #e6edf3; }
.picture .box, .picture .go { stroke: #a5aeb8; } .picture .tip { fill: #a5aeb8; }
}
""".strip()
EDGE: Final = 16
HEAD: Final = 26

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
class Node:
    """A box with a name, and lines of a note below it; ``rank`` is its colour."""

    text: str
    note: str
    rank: int

    @property
    def lines(self) -> list[str]:
        """Lines of the note."""
        return self.note.splitlines()

    @property
    def height(self) -> int:
        """Height of the box."""
        return 26 + 15 * len(self.lines)


@dataclass(frozen=True, slots=True)
class Flow:
    """Columns of nodes, and lines from a (column, row) to another column's."""

    columns: Sequence[tuple[str, Sequence[Node]]]
    edges: Sequence[tuple[tuple[int, int], tuple[int, int]]]
    gap: int = 56
    space: int = 10

    @property
    def size(self) -> tuple[int, int]:
        heights = [sum(node.height + self.space for node in nodes) - self.space for _, nodes in self.columns]
        return sum(self._widths) + self.gap * (len(self.columns) - 1), HEAD + max(heights)

    @property
    def _widths(self) -> list[int]:
        return [
            20 + round(max(7 * len(title), *(max(7.2 * len(node.text), 6.4 * _longest(node.lines)) for node in nodes)))
            for title, nodes in self.columns
        ]

    def draw(self, x: int, y: int) -> Lines:
        lefts = [x + sum(self._widths[:number]) + self.gap * number for number in range(len(self.columns))]
        for (column, row), (end_column, end_row) in self.edges:
            begin, end = lefts[column] + self._widths[column], lefts[end_column]
            bend, up, down = (begin + end) // 2, self._middle(y, column, row), self._middle(y, end_column, end_row)
            yield f'<path class="go curve" d="M{begin} {up}C{bend} {up} {bend} {down} {end} {down}"/>'
        for number, (title, nodes) in enumerate(self.columns):
            left, width = lefts[number], self._widths[number]
            yield text_at(left, y + 14, title, "head")
            for row, node in enumerate(nodes):
                top, fill = self._top(y, number, row), COLOURS[node.rank % len(COLOURS)]
                yield f'<rect class="box" x="{left}" y="{top}" width="{width}" height="{node.height}" rx="5" fill="{fill}"/>'
                yield text_at(left + width // 2, top + 18, node.text, "in")
                for line, text in enumerate(node.lines):
                    yield text_at(left + width // 2, top + 33 + 15 * line, text, "in small")

    def _top(self, y: int, column: int, row: int) -> int:
        return y + HEAD + sum(node.height + self.space for node in self.columns[column][1][:row])

    def _middle(self, y: int, column: int, row: int) -> int:
        return self._top(y, column, row) + self.columns[column][1][row].height // 2


def _longest(lines: Sequence[str]) -> int:
    return max(map(len, lines), default=0)


@dataclass(frozen=True, slots=True)
class Picture:
    """``name`` is that of the file, ``text`` describes in words what the rows of panels show."""

    name: str
    title: str
    text: str
    panels: Sequence[Sequence[Panel]]


def svg(picture: Picture) -> str:
    """The picture as the text of a file."""
    drawn: list[str] = []
    width, y = width_of(picture.title), EDGE
    for row in picture.panels:
        x = EDGE
        for panel in row:
            drawn += panel.draw(x, y)
            x += panel.size[0] + 40
        width = max(width, x - 40 + EDGE)
        y += max(panel.size[1] for panel in row) + 22
    height = y - 22 + EDGE
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'class="picture" role="img" aria-labelledby="{picture.name}-title {picture.name}-text">',
            f'<title id="{picture.name}-title">{escape(picture.title)}</title>',
            f'<desc id="{picture.name}-text">{escape(picture.text)}</desc>',
            f"<style>{_STYLE}</style>",
            f'<rect class="page" width="{width}" height="{height}" rx="8"/>',
            *drawn,
            "</svg>\n",
        ]
    )


def text_at(x: int, y: int, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x}" y="{y}">{escape(text)}</text>'


def line_to(x: int, y: int, end_x: int, end_y: int, kind: Kind) -> str:
    """A line with its tip at the end."""
    across, down = end_x - x, end_y - y
    length = (across**2 + down**2) ** 0.5
    back_x, back_y = end_x - 9 * across / length, end_y - 9 * down / length
    side_x, side_y = 4 * down / length, 4 * across / length
    tip = [(end_x, end_y), (back_x + side_x, back_y - side_y), (back_x - side_x, back_y + side_y)]
    points = " ".join(f"{number_text(a)},{number_text(b)}" for a, b in tip)
    line = f'<path class="go {kind}" d="M{x} {y}L{number_text(back_x)} {number_text(back_y)}"/>'
    return f'{line}<polygon class="tip" points="{points}"/>'


def number_text(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def width_of(text: str) -> int:
    """Return about what a title takes, in pixels."""
    return 8 * len(text)
