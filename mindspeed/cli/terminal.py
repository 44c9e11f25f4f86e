"""Fit text to the terminal: its width, its encoding, and whether it shows styles."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import Final

import click

WITHOUT_TERMINAL: Final = 80
"""Columns of output that goes into a file or a pipe; COLUMNS gives another number."""
LEAST: Final = 16
"""Narrower than this no text is wrapped."""
_NARROW: Final = 30
"""Columns that a text needs behind the cells before it; with fewer it gets lines below them."""


def columns() -> int:
    """Return the columns of the terminal, or those of COLUMNS."""
    given = os.environ.get("COLUMNS", "")
    if not (given.isdecimal() and int(given)) and not sys.stdout.isatty():
        return WITHOUT_TERMINAL
    return max(LEAST, shutil.get_terminal_size((WITHOUT_TERMINAL, 24)).columns)


def bold(text: str) -> str:
    """Make a text bold where NO_COLOR is not set; click removes the style where output is no terminal."""
    return text if os.environ.get("NO_COLOR") else click.style(text, bold=True)


def shortened(text: str, width: int) -> str:
    """Shorten a text at a word boundary to at most ``width`` columns; three dots mark the omission."""
    return text if len(text) <= width else textwrap.shorten(text, max(width, 4), placeholder=" ...").strip()


def fitted(text: str, indent: str = "  ") -> list[str]:
    """Return one line, cut to the terminal's width; on a narrow terminal the whole text in several."""
    width = columns() - len(indent)
    return [f"{indent}{shortened(text, width)}"] if width >= _NARROW else wrapped(text, indent)


def wrapped(text: str, indent: str = "", width: int | None = None) -> list[str]:
    """Wrap a text into lines of the terminal's width; lines after the first have the indent of the first and two spaces."""
    width = max(LEAST, width or columns())
    broken = textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=f"{indent}  ", break_on_hyphens=False, break_long_words=False
    )
    return broken or [indent]


def on_terminal(text: str, indent: str = "") -> list[str]:
    """Return a line as it is where output is no terminal; on one it is wrapped to its width."""
    return wrapped(text, indent) if sys.stdout.isatty() else [f"{indent}{text}"]


def rows_of_cells(rows: Sequence[Sequence[str]], indent: str = "  ") -> Iterator[str]:
    """Yield a line for each row: aligned cells, the last one cut, or wrapped below the others where it is narrow."""
    if not rows:
        return
    widths = [max(map(len, cells)) for cells in zip(*(row[:-1] for row in rows), strict=True)]
    before = len(indent) + sum(widths) + 2 * len(widths)
    for *cells, text in rows:
        if columns() - before < _NARROW:
            yield from wrapped(" ".join(cell.strip() for cell in cells), indent)
            yield from wrapped(text, f"{indent}  ") if text else ()
        else:
            aligned = "".join(f"{cell:<{width}}  " for cell, width in zip(cells, widths, strict=True))
            yield f"{indent}{aligned}{shortened(text, columns() - before)}".rstrip()


def tolerate_any_text() -> None:
    """Let output show a character that its encoding lacks as its number, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure") and "utf" not in (stream.encoding or "").lower():
            stream.reconfigure(errors="backslashreplace")
