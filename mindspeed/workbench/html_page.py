"""Self-contained HTML pages: one file without scripts, readable in light and dark, on a narrow screen and on paper."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import Final

_STYLE: Final = """\
:root { color-scheme: light dark; --ink: #1f2328; --soft: #59636e; --page: #ffffff; --card: #f6f8fa; --line: #d1d9e0;
  --c0: #4a7fd6; --c1: #d6804a; --c2: #5a9e5a; --c3: #a05ab0; --c4: #c2a12b; --c5: #3a9c9c; --c6: #d0678f; --c7: #8b8f98; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --soft: #9aa4af; --page: #0d1117; --card: #161b22; --line: #30363d; }
}
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 74rem; margin: 1.5rem auto; padding: 0 1rem; color: var(--ink);
  background: var(--page); overflow-wrap: break-word; }
h1 { font-size: 1.5rem; margin: 0 0 .3rem; }
h2 { font-size: 1.1rem; margin: 2rem 0 .6rem; padding-bottom: .2rem; border-bottom: 1px solid var(--line); }
h3 { font-size: .95rem; margin: 1rem 0 .3rem; }
p { margin: .3rem 0; } figcaption, .note, th { color: var(--soft); font-size: .85rem; }
section > div, details > div { overflow-x: auto; }
summary { cursor: pointer; font-weight: 600; margin: .4rem 0; }
table { border-collapse: collapse; font-size: .9rem; }
td, th { border-bottom: 1px solid var(--line); padding: .25rem .9rem .25rem 0; text-align: left; vertical-align: top; }
td.number, .numbers :is(td, th):not(:first-child) { text-align: right; font-variant-numeric: tabular-nums; }
td.number { white-space: nowrap; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: .6rem; margin: 1rem 0; }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: .4rem; padding: .5rem .7rem; }
.tile b { display: block; font-size: 1.15rem; } .tile span { color: var(--soft); font-size: .8rem; display: block; }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(24rem, 100%), 1fr)); gap: 1rem; }
figure { margin: 0; min-width: 0; } figcaption b { color: var(--ink); display: block; font-size: .95rem; }
.bar { display: flex; height: 1.1rem; background: var(--card); border: 1px solid var(--line); margin: .1rem 0 .5rem; }
.bar span { height: 100%; flex: none; } .key { white-space: nowrap; margin-right: 1rem; font-size: .85rem; }
.key i { display: inline-block; width: .8rem; height: .8rem; margin-right: .3rem; border-radius: .15rem; }
.c0 { background: var(--c0); } .c1 { background: var(--c1); } .c2 { background: var(--c2); } .c3 { background: var(--c3); }
.c4 { background: var(--c4); } .c5 { background: var(--c5); } .c6 { background: var(--c6); } .c7 { background: var(--c7); }
.ranks td { border: 1px solid var(--line); padding: .3rem .5rem; font-size: .85em; }
svg[viewBox] { max-width: 100%; height: auto; } .wide svg[viewBox] { max-width: none; } .full svg[viewBox] { width: 100%; }
.curve text { font-family: system-ui, sans-serif !important; }"""
COLOURS: Final = 8
"""Colours of the parts of a bar."""


def page(title: str, *parts: str) -> str:
    """A whole page. ``parts`` are HTML, made by the functions below."""
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>\n{_STYLE}\n</style>"
    )
    body = "\n".join((f"<h1>{escape(title)}</h1>", *parts))
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>{body}\n</body></html>\n'


def section(title: str, *parts: str) -> str:
    """A part with a heading; wide content scrolls inside it."""
    return f"<section><h2>{escape(title)}</h2><div>{''.join(parts)}</div></section>"


def details(title: str, *parts: str) -> str:
    """A part that a reader opens."""
    return f"<details><summary>{escape(title)}</summary><div>{''.join(parts)}</div></details>"


def heading(text: str) -> str:
    """A heading inside a section."""
    return f"<h3>{escape(text)}</h3>"


def paragraph(text: str, kind: str = "") -> str:
    """A paragraph of plain text. ``kind`` is a class of the style."""
    return f"<p{f' class={chr(34)}{kind}{chr(34)}' if kind else ''}>{escape(text)}</p>"


def tiles(values: Iterable[tuple[str, str, str]]) -> str:
    """The numbers that a reader looks for first: each a name, a value, and a note below it."""
    boxes = (
        f'<div class="tile"><span>{escape(name)}</span><b>{escape(value)}</b><span>{escape(note)}</span></div>'
        for name, value, note in values
    )
    return f'<div class="tiles">{"".join(boxes)}</div>'


def figure(title: str, drawing: str, note: str = "") -> str:
    """A drawing with its title and a note."""
    text = f"<b>{escape(title)}</b>{escape(note)}"
    return f"<figure><figcaption>{text}</figcaption>{drawing}</figure>"


def figures(*drawn: str) -> str:
    """Figures in columns where the screen is wide enough."""
    return f'<div class="figures">{"".join(drawn)}</div>'


def inline(svg: str, kind: str = "") -> str:
    """The text of an SVG file as a part of a page: what only a file needs is removed. ``kind`` is a class of the style."""
    drawing = re.sub(r"\s?xmlns(:\w+)?=\"[^\"]*\"|<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    return f'<div class="{kind}">{drawing}</div>'


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
    items = (
        f'<span class="key"><i class="c{number % COLOURS}"></i>{escape(name)}</span> ' for number, name in enumerate(names)
    )
    return f"<p>{''.join(items)}</p>"
