"""Self-contained HTML pages: one file without scripts, readable in light and dark, on a narrow screen and on paper."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import starmap
from typing import Final

_STYLE: Final = """\
:root { color-scheme: light dark; --line: #8885; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
section > div { overflow-x: auto; }
table { border-collapse: collapse; }
td, th { border-bottom: 1px solid var(--line); padding: .2rem .8rem .2rem 0; text-align: left; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
.bar { display: flex; height: 1.1rem; background: #8882; } .bar span { height: 100%; }
.c0 { background: #4a7fd6; } .c1 { background: #d6804a; } .c2 { background: #5a9e5a; } .c3 { background: #a05ab0; }
.l0 { stroke: #4a7fd6; } .l1 { stroke: #d6804a; } .l2 { stroke: #5a9e5a; } .l3 { stroke: #a05ab0; }
.ranks td { border: 1px solid var(--line); padding: .3rem .5rem; vertical-align: top; font-size: .85em; }
svg[viewBox] { max-width: 100%; height: auto; }"""
COLOURS: Final = 4
"""Colours of the parts of a bar, and of the lines of a chart."""


def page(title: str, *parts: str) -> str:
    """A whole page. ``parts`` are HTML, made by the functions below."""
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    return f"<!doctype html>\n<html><head>{head}<style>\n{_STYLE}\n</style></head>\n<body><h1>{escape(title)}</h1>\n" + (
        "\n".join(parts) + "\n</body></html>\n"
    )


def section(title: str, *parts: str) -> str:
    """A part with a heading; wide content scrolls inside it."""
    return f"<section><h2>{escape(title)}</h2><div>{''.join(parts)}</div></section>"


def paragraph(text: str) -> str:
    """A paragraph of plain text."""
    return f"<p>{escape(text)}</p>"


def table(headers: Sequence[str], rows: Iterable[Sequence[object]], kind: str = "") -> str:
    """A table; numbers stand to the right. ``kind`` is a class of the style."""
    head = "".join(f"<th>{escape(header)}</th>" for header in headers)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f'<table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _cell(value: object) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f'<td class="number">{value:,}</td>'
    return f"<td>{escape(str(value)).replace(chr(10), '<br>')}</td>"


def bar(parts: Sequence[tuple[str, float]], whole: float) -> str:
    """A bar whose parts are shares of ``whole``; the name and value of a part are its title."""
    spans = (
        f'<span class="c{number % COLOURS}" style="width:{100 * value / whole if whole else 0:.2f}%" '
        f'title="{escape(name)}: {value:,.1f}"></span>'
        for number, (name, value) in enumerate(parts)
    )
    return f'<div class="bar">{"".join(spans)}</div>'


def legend(names: Sequence[str]) -> str:
    """Text on what the colours of bars mean."""
    items = (f'<span class="c{number % COLOURS}">&emsp;</span> {escape(name)}&emsp;' for number, name in enumerate(names))
    return f"<p>{''.join(items)}</p>"


def chart(lines: Mapping[str, Sequence[tuple[float, float]]], label: str, width: int = 720, height: int = 220) -> str:
    """Lines through points as one SVG, with the least and the largest value on its axis, and a legend for several lines."""
    lines = {name: points for name, points in lines.items() if len(points) > 1}
    if not lines:
        return paragraph(f"{label}: too few points for a line")
    across, up = zip(*(point for points in lines.values() for point in points), strict=True)
    (low, high), (least, most) = (min(across), max(across)), (min(up), max(up))
    wide, tall = (high - low) or 1, (most - least) or 1

    def place(x: float, y: float) -> str:
        return f"{50 + (x - low) / wide * (width - 60):.1f},{10 + (most - y) / tall * (height - 40):.1f}"

    texts = (
        f'<text x="2" y="16">{most:.4g}</text><text x="2" y="{height - 28}">{least:.4g}</text>'
        f'<text x="50" y="{height - 6}">{low:g}</text><text x="{width - 60}" y="{height - 6}">{high:g}</text>'
    )
    drawn = "".join(
        f'<polyline class="l{number % COLOURS}" fill="none" stroke-width="1.5" points="{" ".join(starmap(place, points))}"/>'
        for number, points in enumerate(lines.values())
    )
    return (legend(list(lines)) if len(lines) > 1 else "") + (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" role="img" aria-label="{escape(label)}" fill="currentColor" '
        f'font-size="11">{drawn}{texts}</svg>'
    )
