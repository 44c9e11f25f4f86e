"""Chinese pages, from English ones and a table of translations: ``python -m tools.docs.chinese`` writes them.

A unit is a heading, a paragraph, an item of a list or a cell of a table. The table has a translation of each, so a unit that
was changed in English has none, and a test names it. Code, output and names stay as they are.

A new feature needs no translation at once: the number of features that begins a unit is ``{number}`` in the table, and a
summary without a translation stays English and is named below the list of features.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

import yaml

ROOT: Final = Path(__file__).resolve().parents[2]
TABLE: Final = ROOT / "docs" / "zh" / "translations.yaml"
PAGES: Final[Mapping[str, str]] = {
    "README.md": "README.zh.md",
    "docs/index.md": "docs/zh/index.md",
    "docs/install.md": "docs/zh/install.md",
    "docs/quickstart-megatron-lm.md": "docs/zh/quickstart-megatron-lm.md",
    "docs/quickstart-own-trainer.md": "docs/zh/quickstart-own-trainer.md",
    "docs/quickstart-mindspeed.md": "docs/zh/quickstart-mindspeed.md",
    "docs/failures.md": "docs/zh/failures.md",
    "docs/moving-from-mindspeed.md": "docs/zh/moving-from-mindspeed.md",
    "docs/features/index.md": "docs/zh/features.md",
}
DECLARED: Final = "docs/features/index.md"
"""The page whose prose is the summaries of features; each may wait for its translation."""
_NUMBER: Final = re.compile(r"^\d+(?= features\b)")
_MADE: Final = "<!-- made by `make docs` from {source} and docs/zh/translations.yaml; do not edit -->"
_TABLES: Final[Mapping[str, str]] = {
    "flags": "flags-that-stand-for-features",
    "other flags": "all-other-flags",
    "published commands": "published-commands",
    "imports": "import-names",
}
"""Marked tables that only the English page has, with its anchors."""
_MARKED: Final = re.compile(rf"^<!-- ({'|'.join(_TABLES)}) -->\n.*?^<!-- end of \1 -->$", re.DOTALL | re.MULTILINE)
_ITEM: Final = re.compile(r"^( *(?:-|\d+\.) +)(?=\S)", re.MULTILINE)
_LINK: Final = re.compile(r"\]\(([^)\s#]*)(#[^)\s]*)?\)")
Translate = Callable[[str, bool], str]
"""From a unit and whether it needs a translation: a cell without prose, such as a name, has one or stays."""


def translations() -> dict[str, str]:
    """The table: English unit to Chinese."""
    rows: list[dict[str, str]] = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    return {row["en"]: row["zh"] for row in rows}


def row_of(unit: str) -> str:
    """What the table calls a unit."""
    return _NUMBER.sub("{number}", unit)


def translated(unit: str, known: Mapping[str, str]) -> str | None:
    """The translation of a unit; None without one."""
    number = _NUMBER.match(unit)
    chinese = known.get(row_of(unit))
    return chinese.replace("{number}", number[0]) if number and chinese else chinese


def page(source: str, translate: Translate) -> str:
    """The Chinese page of an English one."""
    text = (ROOT / source).read_text(encoding="utf-8")
    where = os.path.relpath(ROOT / source, (ROOT / PAGES[source]).parent)
    text = _MARKED.sub(lambda found: f"[{found[1]}]({Path(source).name}#{_TABLES[found[1]]})", text)
    lines = [made for piece in _pieces(text) if (made := _piece(piece, translate)) is not None]
    title, _, rest = "\n".join(_without_gaps(lines)).partition("\n")
    note = f"{_MADE.format(source=source)}\n\n[English]({where})"
    return _relinked(f"{title}\n\n{note}\n{rest}", source).rstrip() + "\n"


def _pieces(text: str) -> Iterator[str]:
    """Yield fenced blocks and paragraphs, each whole, and every other line."""
    kept: list[str] = []
    fenced = False
    for line in text.splitlines():
        fence = line.lstrip().startswith("```")
        alone = not line.strip() or line.startswith(("#", "|", "<!--"))
        if kept and not fenced and (fence or alone):
            yield "\n".join(kept)
            kept = []
        if alone and not fenced:
            yield line
            continue
        kept.append(line)
        if fence and fenced:
            yield "\n".join(kept)
            kept = []
        fenced ^= fence
    if kept:
        yield "\n".join(kept)


def _piece(piece: str, translate: Translate) -> str | None:
    """One piece of a page in Chinese; None for what is left out."""
    if piece.startswith("<!--"):
        return None
    if not piece.strip() or piece.lstrip().startswith("```"):
        return piece
    if piece.startswith("#"):
        marks, _, title = piece.partition(" ")
        return f"{marks} {translate(title, True)}"
    if piece.startswith("|"):
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", piece)[1:-1]]
        return "| " + " | ".join(translate(cell, _has_prose(cell)) for cell in cells) + " |"
    parts = _ITEM.split(piece)
    indent = piece[: len(piece) - len(piece.lstrip())]
    text = [indent + translate(_unit(parts[0]), True)] if parts[0].strip() else []
    text += [f"{mark}{translate(_unit(item), True)}" for mark, item in zip(parts[1::2], parts[2::2], strict=True)]
    return "\n".join(text)


def _unit(text: str) -> str:
    return " ".join(text.split())


def _has_prose(cell: str) -> bool:
    """Return whether a cell has words in sequence outside code and link targets."""
    bare = re.sub(r"`[^`]*`|\]\([^)]*\)|\[", "", cell)
    return re.search(r"[A-Za-z]{2,} [A-Za-z]{2,}", bare) is not None


def _without_gaps(lines: list[str]) -> list[str]:
    """Lines with at most one empty one in a row."""
    return [line for number, line in enumerate(lines) if line.strip() or (number and lines[number - 1].strip())]


def _relinked(text: str, source: str) -> str:
    """Links as they are from the Chinese page: to Chinese pages where there are some."""
    here = (ROOT / PAGES[source]).parent

    def link(found: re.Match[str]) -> str:
        path, anchor = found[1], found[2] or ""
        if "://" in path or not path:
            return found[0]
        target = ((ROOT / source).parent / path).resolve()
        name = target.relative_to(ROOT).as_posix()
        chinese = PAGES.get(name) if not anchor else None
        return f"]({os.path.relpath(ROOT / chinese if chinese else target, here)}{anchor})"

    head, english, rest = text.partition("[English](")
    own, _, rest = rest.partition("\n")
    return f"{head}{english}{own}\n{_LINK.sub(link, rest)}"


def pages() -> dict[str, str]:
    """Every Chinese page by its path; a unit without translation stays English."""
    known = translations()
    made = {PAGES[source]: page(source, lambda unit, _: translated(unit, known) or unit) for source in PAGES}
    if waiting := untranslated(DECLARED):
        made[PAGES[DECLARED]] += "\n## 尚无译文\n\n" + "".join(f"- {unit}\n" for unit in waiting)
    return made


def untranslated(source: str) -> list[str]:
    """The units of a page that need a translation and have none."""
    known = translations()
    return [unit for unit, needed in units(source).items() if needed and translated(unit, known) is None]


def units(source: str) -> dict[str, bool]:
    """Every unit of a page, and whether it needs a translation."""
    found: dict[str, bool] = {}

    def note(unit: str, needed: bool) -> str:
        found[unit] = needed
        return unit

    page(source, note)
    return found


if __name__ == "__main__":
    for name, text in pages().items():
        (ROOT / name).write_text(text, encoding="utf-8")
