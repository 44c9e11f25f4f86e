"""Timelines of a pipeline as text and as SVG, from a simulation or a record of a run. Light, no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby
from typing import Final

from mindspeed.pipeline.operations import Op
from mindspeed.pipeline.simulator import Span

COLOURS: Final = {"F": "#6fa8dc", "B": "#6fbf73", "W": "#f2d45c", "D": "#a8cf7c", "R": "#c9a2d8"}
"""All light: a number in them is dark on every page."""
MEANINGS: Final = {"F": "forward", "B": "input gradient", "W": "weight gradient", "D": "both gradients", "R": "recomputation"}
_ROW: Final = 22
_LEFT: Final = 60
_STYLE: Final = """
.timeline { font: 12px system-ui, sans-serif; }
.timeline.fluid { box-sizing: border-box; padding: 0 10px 0 60px; overflow: visible; }
.timeline text { fill: #24292f; } .timeline .number { fill: #1b1f24; font-size: 9px; }
.timeline .op { stroke: #57606a; stroke-width: 0.5; } .timeline .odd { fill-opacity: 0.7; } .timeline .lane { fill: #8882; }
@media (prefers-color-scheme: dark) {
.timeline { background: #0d1117; } .timeline text { fill: #e6edf3; } .timeline .number { fill: #0d1117; }
}
""".strip()

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


def as_svg(timelines: Sequence[tuple[str, Timeline]], width: int | None = 1100) -> str:
    """Return a picture with the titled timelines below each other, each scaled separately.

    ``width`` is that of the time axis; None makes it as wide as the page in which the picture stands.
    """
    kinds = {op.kind for _, timeline in timelines for rank in timeline for op, *_ in rank}
    shown = [kind for kind in MEANINGS if kind in kinds]
    parts, top = [f"<style>{_STYLE}</style>"], 0
    for title, timeline in timelines:
        parts.append(f'<text x="{4 - _LEFT}" y="{top + 16}">{escape(title)}</text>')
        top += _ROW
        parts += _rows(timeline, top)
        top += (len(timeline) + 1) * _ROW
    for number, kind in enumerate(shown):
        parts.append(f'<svg x="{50 * (number % 2)}%" y="{top + number // 2 * _ROW}" width="50%" height="{_ROW}">')
        parts.append(f'<rect y="4" width="12" height="12" fill="{COLOURS[kind]}"/>')
        parts.append(f'<text x="18" y="14">{MEANINGS[kind]}</text></svg>')
    height = top + (len(shown) + 1) // 2 * _ROW
    label = f'role="img" aria-label="{escape("; ".join(title for title, _ in timelines))}"'
    if width is None:
        return "\n".join([f'<svg class="timeline fluid" width="100%" height="{height}" {label}>', *parts, "</svg>"])
    outer = f'<svg xmlns="http://www.w3.org/2000/svg" class="timeline" width="{_LEFT + width + 10}" height="{height}" {label}>'
    return "\n".join([outer, f'<svg x="{_LEFT}" width="{width}" overflow="visible">', *parts, "</svg>", "</svg>", ""])


def _rows(timeline: Timeline, top: int) -> list[str]:
    """Draw a row for each rank."""
    end = max((rank[-1].end for rank in timeline if rank), default=1.0)
    parts = []
    for number, rank in enumerate(timeline):
        y = top + number * _ROW
        parts.append(f'<text x="{4 - _LEFT}" y="{y + 15}">rank {number}</text>')
        parts.append(f'<svg y="{y}" height="{_ROW}"><rect class="lane" y="2" width="100%" height="{_ROW - 4}"/>')
        for (op, begin, stop), lane, together in lanes(rank):
            x, share, height = 100 * begin / end, 100 * (stop - begin) / end, (_ROW - 4) / together
            above = 2 + lane * height
            text_at = f'x="{x + 0.15:.2f}%" y="{above + height / 2 + 3:g}"'
            label = f'<text class="number" {text_at}>{op.micro_batch}</text>' if share > 1.2 else ""
            parts.append(
                f'<rect class="op{" odd" if op.chunk % 2 else ""}" x="{x:.2f}%" y="{above:g}" width="{share:.2f}%" '
                f'height="{height:g}" fill="{COLOURS[op.kind]}"><title>{escape(str(op))}</title></rect>{label}'
            )
        parts.append("</svg>")
    return parts
