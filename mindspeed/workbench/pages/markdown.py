"""Tables, code and pages in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table; cells may hold bars and line breaks."""
    lines = ["| " + " | ".join(headers) + " |", "|" + "---|" * len(headers)]
    lines += ["| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in row) + " |" for row in rows]
    return lines


def code(text: object) -> str:
    """Return ``text`` set as code."""
    return f"`{text}`"


def page(title: str, source: str, *parts: Iterable[str]) -> str:
    """Return a page with its title, a note on where it is made from, and its parts, one empty line between them."""
    return "\n\n".join([f"# {title}", f"<!-- made from {source} -->", *("\n".join(part) for part in parts)]).rstrip() + "\n"
