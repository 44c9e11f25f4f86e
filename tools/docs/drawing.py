"""Panels of pictures of who holds what and what travels when: strips, matrices and timelines of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from mindspeed.workbench.pictures.drawing import COLOURS, HEAD, Kind, Lines, line_to, number_text, text_at, width_of

_LABEL: Final = 62


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
        return max(head, width_of(self.title)), HEAD + 18 + self.side * len(self.rows)

    def draw(self, x: int, y: int) -> Lines:
        yield text_at(x, y + 14, self.title, "head")
        left, top = x + _LABEL, y + HEAD + 18
        for column, label in enumerate(self.columns):
            yield text_at(left + column * self.side + self.side // 2, top - 6, label, "ink mid")
        for row, label in enumerate(self.rows):
            yield text_at(left - 8, top + row * self.side + self.side // 2 + 5, label, "ink end")
        for (row, column), mark in sorted(self.cells.items()):
            yield from self._cell(left + column * self.side, top + row * self.side, mark)

    def _cell(self, x: int, y: int, mark: Mark) -> Lines:
        side, fill = self.side, COLOURS[mark.rank % len(COLOURS)]
        if mark.cut:
            yield f'<path class="box" d="M{x} {y}v{side}h{side}z" fill="{fill}"/>'
            yield text_at(x + side // 3, y + side - 4, mark.text, "in")
        else:
            yield f'<rect class="box" x="{x}" y="{y}" width="{side}" height="{side}" fill="{fill}"/>'
            yield text_at(x + side // 2, y + side // 2 + 5, mark.text, "in")


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
        return max(across, width_of(self.title)), HEAD + 18 + self.ranks * (self.height + 14) - 14

    def draw(self, x: int, y: int) -> Lines:
        yield text_at(x, y + 14, self.title, "head")
        left, top = x + _LABEL, y + HEAD + 18
        for column, label in enumerate(self.columns):
            yield text_at(left + column * (self.width + self.gap) + self.width // 2, top - 6, label, "ink mid")
        for rank, name in enumerate(self.names or [f"rank {rank}" for rank in range(self.ranks)]):
            yield text_at(left - 8, top + rank * (self.height + 14) + self.height // 2 + 5, name, "ink end")
        for arrow in self.arrows:
            (begin_x, begin_y), (end_x, end_y) = self._corner(left, top, arrow.begin), self._corner(left, top, arrow.end)
            begin_y, end_y = begin_y + self.height // 2, end_y + self.height // 2
            yield line_to(begin_x + self.width, begin_y, end_x - 3, end_y, arrow.kind)
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
            w, h = number_text(width * side), number_text(height * side)
            at = f"M{number_text(x + 6 + across * side)} {number_text(y + 6 + down * side)}"
            yield f'<path class="glyph" d="{at}{f"v{h}h{w}z" if cut else f"h{w}v{h}h-{w}z"}"/>'
        yield text_at(x + (self.width + side) // 2 + (3 if side else 0), y + self.height // 2 + 5, box.text, "in")


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
        return max(self._label + self.cells * self.cell, width_of(self.title)), HEAD + len(self.busy) * (self.height + 6)

    @property
    def _label(self) -> int:
        return 7 * max(map(len, self.busy)) + 16

    def draw(self, x: int, y: int) -> Lines:
        yield text_at(x, y + 14, self.title, "head")
        for number, (name, intervals) in enumerate(self.busy.items()):
            top = y + HEAD + number * (self.height + 6)
            yield text_at(x + self._label - 8, top + self.height // 2 + 5, name, "ink end")
            for begin, end in intervals:
                left, width = x + self._label + begin * self.cell, (end - begin) * self.cell
                at = f'x="{left}" y="{top}" width="{width}" height="{self.height}"'
                yield f'<rect {at} fill="{COLOURS[number % len(COLOURS)]}"/>'


@dataclass(frozen=True, slots=True)
class Shares:
    """Bars of what is left of a whole: a name, a share from 0 to 1, and its text for each."""

    title: str
    rows: Sequence[tuple[str, float, str]]
    width: int = 430
    height: int = 14

    @property
    def size(self) -> tuple[int, int]:
        return max(self.width, *(_words(name, text) for name, _, text in self.rows)), HEAD + 42 * len(self.rows)

    def draw(self, x: int, y: int) -> Lines:
        yield text_at(x, y + 14, self.title, "head")
        for number, (name, share, text) in enumerate(self.rows):
            top = y + HEAD + 42 * number
            yield text_at(x, top + 13, f"{name}: {text}", "ink")
            width = max(2, round(self.width * share))
            yield f'<rect class="empty" x="{x}" y="{top + 18}" width="{self.width}" height="{self.height}"/>'
            yield (
                f'<rect class="box" x="{x}" y="{top + 18}" width="{width}" height="{self.height}" '
                f'fill="{COLOURS[number % len(COLOURS)]}"/>'
            )


def _words(name: str, text: str) -> int:
    return 7 * len(f"{name}: {text}")
