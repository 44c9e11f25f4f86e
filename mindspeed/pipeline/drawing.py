"""Timelines of a pipeline as text and as SVG, from a simulation or a record of a run. Light, no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby
from typing import Final

from mindspeed.pipeline.operations import Op
from mindspeed.pipeline.simulator import Span

COLOURS: Final = {"F": "#4c78a8", "B": "#59a14f", "W": "#edc948", "D": "#8cb369", "R": "#b07aa1"}
MEANINGS: Final = {"F": "forward", "B": "input gradient", "W": "weight gradient", "D": "both gradients", "R": "recomputation"}
_ROW: Final = 22
_LEFT: Final = 60

Timeline = Sequence[Sequence[Span]]
"""Spans of each rank, in order."""


def read_traces(texts: Sequence[str]) -> Timeline:
    """Read the records of ranks: JSON lines ``[kind, chunk, micro_batch, begin, end, waited]`` in seconds.

    The earliest begin becomes 0, as every rank has the clock of its machine.
    """
    lines = [[json.loads(line) for line in text.splitlines()] for text in texts]
    start = min((line[3] for rank in lines for line in rank), default=0.0)
    return [[Span(Op(*line[:3]), line[3] - start, line[4] - start) for line in rank] for rank in lines]


def lanes(rank: Sequence[Span]) -> Iterator[tuple[Span, int, int]]:
    """Yield the spans of a rank with their lane and the number of lanes: two where two operations run together."""
    for _, together in groupby(rank, lambda span: (span.begin, span.end)):
        spans = list(together)
        for lane, span in enumerate(spans):
            yield span, lane, len(spans)


def as_text(timeline: Timeline, width: int = 100) -> list[str]:
    """Return a line for each rank: its operation at each moment, lower case for chunks 1, 3 and so on, a dot where it is
    idle. Operations that run together alternate."""
    end = max((rank[-1].end for rank in timeline if rank), default=0.0)
    lines = []
    for number, rank in enumerate(timeline):
        cells = ["."] * width
        for (op, begin, stop), lane, together in lanes(rank):
            first = round(begin / end * width)
            for cell in range(first, max(first + 1, round(stop / end * width))):
                if cell < width and (cell - first) % together == lane:
                    cells[cell] = op.kind.lower() if op.chunk % 2 else op.kind
        lines.append(f"rank {number:<3} {''.join(cells)}")
    return lines


def as_svg(timelines: Sequence[tuple[str, Timeline]], width: int = 1100) -> str:
    """Return a picture with the titled timelines below each other, each scaled separately."""
    rows = sum(len(timeline) + 2 for _, timeline in timelines) + 1
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + width + 10}" height="{rows * _ROW}" '
        'font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    top = 0
    for title, timeline in timelines:
        parts.append(f'<text x="4" y="{top + 16}" font-size="13">{escape(title)}</text>')
        top += _ROW
        parts += _rows(timeline, top, width)
        top += (len(timeline) + 1) * _ROW
    for place, (kind, meaning) in enumerate(MEANINGS.items()):
        left = _LEFT + place * 150
        parts.append(f'<rect x="{left}" y="{top + 4}" width="12" height="12" fill="{COLOURS[kind]}"/>')
        parts.append(f'<text x="{left + 17}" y="{top + 14}">{kind} {meaning}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _rows(timeline: Timeline, top: int, width: int) -> list[str]:
    end = max((rank[-1].end for rank in timeline if rank), default=1.0)
    parts = []
    for number, rank in enumerate(timeline):
        y = top + number * _ROW
        parts.append(f'<text x="4" y="{y + 15}">rank {number}</text>')
        for (op, begin, stop), lane, together in lanes(rank):
            x, w = _LEFT + begin / end * width, (stop - begin) / end * width
            height = (_ROW - 4) / together
            above = y + 2 + lane * height
            shade = ' fill-opacity="0.6"' if op.chunk % 2 else ""
            below = above + height / 2 + 3
            label = f'<text x="{x + 2:.1f}" y="{below:g}" font-size="8">{op.micro_batch}</text>' if w > 9 else ""
            parts.append(
                f'<rect x="{x:.1f}" y="{above:g}" width="{w:.1f}" height="{height:g}" fill="{COLOURS[op.kind]}"{shade} '
                f'stroke="white" stroke-width="0.5"><title>{escape(str(op))}</title></rect>{label}'
            )
    return parts
