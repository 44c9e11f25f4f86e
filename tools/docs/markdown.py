"""Pieces of Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a table; cells may hold bars and line breaks."""
    lines = ["| " + " | ".join(headers) + " |", "|" + "---|" * len(headers)]
    lines += ["| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in row) + " |" for row in rows]
    return lines


def code(text: object) -> str:
    """``text`` set as code."""
    return f"`{text}`"


def page(title: str, source: str, *parts: Iterable[str]) -> str:
    """A page with its title, a note on where it is made from, and its parts, one empty line between them."""
    made = f"<!-- made by `make docs` from {source}; do not edit -->"
    return "\n\n".join(["# " + title, made, *("\n".join(part) for part in parts)]).rstrip() + "\n"
