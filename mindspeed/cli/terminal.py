"""Fit text to the terminal: its width, its encoding, and whether it shows styles."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import Final
from unicodedata import east_asian_width

import click

WITHOUT_TERMINAL: Final = 80
"""Columns of output that goes into a file or a pipe; COLUMNS gives another number."""
LEAST: Final = 16
"""Narrower than this no text is wrapped."""
_NARROW: Final = 30
"""Columns that a text needs behind the cells before it; with fewer it gets lines below them."""
_WIDE: Final = "[\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe6f\uff01-\uff60\uffe0-\uffe6]"
_CLOSING: Final = "[、。，．：；！？）」』】》〉％]"  # noqa: RUF001
_UNIT: Final = re.compile(f"([（「『【《〈“‘]*(?:[!-~]+|{_WIDE}){_CLOSING}*)(\0* ?)")  # noqa: RUF001
"""What no line breaks: a word or a wide character with the brackets and the punctuation at it; then what `spread` inserts."""


def display_width(text: str) -> int:
    """Return the columns of a text on a terminal: a Chinese character has two."""
    return len(text) if text.isascii() else sum(1 + (east_asian_width(character) in "FW") for character in text)


def padded(text: str, width: int) -> str:
    """Fill a text with spaces up to a number of columns."""
    return text + " " * (width - display_width(text))


def spread(text: str) -> str:
    """Make the length of a text its width, and let lines break between wide characters.

    A null character stands for each further column, a space for the last one, which is lost at the end of a line: wrap it to
    one column less. No line breaks behind an opening bracket or before closing punctuation. `compact` is the inverse.
    """
    return text if text.isascii() else _UNIT.sub(lambda found: found[1] + _filler(found[1]) + found[2], text)


def compact(text: str) -> str:
    """Remove what `spread` inserted."""
    return text if text.isascii() else _UNIT.sub(lambda found: found[1] + found[2][len(_filler(found[1])) :], text)


def _filler(unit: str) -> str:
    wide = display_width(unit) - len(unit)
    return "\0" * (wide - 1) + " " if wide else ""


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
    if display_width(text) <= width:
        return text
    words = spread(" ".join(text.split()))
    return compact(textwrap.wrap(words, max(width - (not text.isascii()), 4), max_lines=1, placeholder=" ...")[0].strip())


def fitted(text: str, indent: str = "  ") -> list[str]:
    """Return one line, cut to the terminal's width; on a narrow terminal the whole text in several."""
    width = columns() - len(indent)
    return [f"{indent}{shortened(text, width)}"] if width >= _NARROW else wrapped(text, indent)


def wrapped(text: str, indent: str = "", width: int | None = None, hang: str = "  ") -> list[str]:
    """Wrap a text into lines of the terminal's width; lines after the first have the indent of the first and ``hang``."""
    width = max(LEAST, width or columns()) - (not text.isascii())
    further = f"{indent}{hang}"
    lines = textwrap.wrap(
        spread(text), width, initial_indent=indent, subsequent_indent=further, break_on_hyphens=False, break_long_words=False
    )
    return [*map(compact, lines)] or [indent]


def on_terminal(text: str, indent: str = "") -> list[str]:
    """Return a line as it is where output is no terminal; on one it is wrapped to its width."""
    return wrapped(text, indent) if sys.stdout.isatty() else [f"{indent}{text}"]


def rows_of_cells(rows: Sequence[Sequence[str]], indent: str = "  ") -> Iterator[str]:
    """Yield a line for each row: aligned cells, the last one cut, or wrapped below the others where it is narrow."""
    if not rows:
        return
    widths = [max(map(display_width, cells)) for cells in zip(*(row[:-1] for row in rows), strict=True)]
    before = len(indent) + sum(widths) + 2 * len(widths)
    for *cells, text in rows:
        if columns() - before < _NARROW:
            yield from wrapped(" ".join(cell.strip() for cell in cells), indent)
            yield from wrapped(text, f"{indent}  ") if text else ()
        else:
            aligned = "".join(f"{padded(cell, width)}  " for cell, width in zip(cells, widths, strict=True))
            yield f"{indent}{aligned}{shortened(text, columns() - before)}".rstrip()


def tolerate_any_text() -> None:
    """Let output show a character that its encoding lacks as its number, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure") and "utf" not in (stream.encoding or "").lower():
            stream.reconfigure(errors="backslashreplace")
