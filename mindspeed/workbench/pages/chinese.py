"""Chinese pages, from English ones and a table of translations.

A unit is a heading, a paragraph, an item of a list or a cell of a table. The table has a translation of each, so a unit that
was changed in English has none, and a test names it. Code, output and names stay as they are. Units that the command line
prints too, such as the paragraph of an error code, are in its catalogue instead.

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

from mindspeed.files.message_catalogue import CHINESE, read_catalogue

TABLE: Final = "docs/zh/translations.yaml"
"""The table, by its place in the repository."""
_TABLE_FILE: Final = Path(__file__).parents[2] / "pages" / "zh" / "translations.yaml"
DECLARED: Final = "features/index.md"
"""The page whose prose is the summaries of features; each may wait for its translation."""
PAGES: Final[Mapping[str, str]] = {
    "index.md": "zh/index.md",
    "install.md": "zh/install.md",
    "first-run.md": "zh/first-run.md",
    "quickstart-megatron-lm.md": "zh/quickstart-megatron-lm.md",
    "quickstart-own-trainer.md": "zh/quickstart-own-trainer.md",
    "quickstart-mindspeed.md": "zh/quickstart-mindspeed.md",
    "enabling-features.md": "zh/enabling-features.md",
    "memory.md": "zh/memory.md",
    "long-context.md": "zh/long-context.md",
    "failures.md": "zh/failures.md",
    "troubleshooting.md": "zh/troubleshooting.md",
    "errors.md": "zh/errors.md",
    "moving-from-mindspeed.md": "zh/moving-from-mindspeed.md",
    DECLARED: "zh/features.md",
}
"""The Chinese page of each English one, by their places in the site."""
SOURCES: Final = {place.removesuffix(".md"): source.removesuffix(".md") for source, place in PAGES.items()}
"""The name of the English page of each Chinese one."""
_NUMBER: Final = re.compile(r"^\d+(?= features\b)")
_TABLES: Final[Mapping[str, str]] = {
    "flags": "flags-that-stand-for-features",
    "other flags": "all-other-flags",
    "published commands": "published-commands",
    "imports": "import-names",
}
"""Marked tables that only the English page has, with its anchors."""
_MARKED: Final = re.compile(rf"^<!-- ({'|'.join(_TABLES)}) -->\n.*?^<!-- end of \1 -->$", re.DOTALL | re.MULTILINE)
_ITEM: Final = re.compile(r"^( *(?:-|\d+\.) +)(?=\S)", re.MULTILINE)
_TARGET: Final = re.compile(r"\]\([^)]*\)")
_LINK: Final = re.compile(r"\]\(([^)\s#]*)(#[^)\s]*)?\)")
Translate = Callable[[str, bool], str]
"""From a unit and whether it needs a translation: a cell without prose, such as a name, has one or stays."""


def table() -> dict[str, str]:
    """Return the table: English unit to Chinese."""
    rows: list[dict[str, str]] = yaml.safe_load(_TABLE_FILE.read_text(encoding="utf-8"))
    return {row["en"]: row["zh"] for row in rows}


def translations() -> dict[str, str]:
    """Return the Chinese text of each unit, of the catalogue and of the table."""
    return read_catalogue(CHINESE.read_text(encoding="utf-8")) | table()


def row_of(unit: str) -> str:
    """Return the key of a unit in the table."""
    return _NUMBER.sub("{number}", unit)


def translated(unit: str, known: Mapping[str, str]) -> str | None:
    """The translation of a unit; None without one."""
    number = _NUMBER.match(unit)
    chinese = known.get(row_of(unit))
    return chinese.replace("{number}", number[0]) if number and chinese else chinese


def printed_page(source: str, text: str) -> str:
    """Return the Chinese page of an English one as it lies in the repository: its links lead to files, not to pages.

    A unit without a translation is kept in English.
    """
    known = {_without_targets(unit): chinese for unit, chinese in translations().items()}
    return page(source, text, lambda unit, _: translated(_without_targets(unit), known) or unit)


def chinese_title(title: str) -> str:
    """Return the title of a page in Chinese."""
    return translations().get(title, title)


def _without_targets(unit: str) -> str:
    return _TARGET.sub("]()", unit)


def page(source: str, text: str, translate: Translate) -> str:
    """Return the Chinese page of an English one."""
    text = _MARKED.sub(lambda found: f"[{found[1]}]({source}#{_TABLES[found[1]]})", text)
    lines = [made for piece in _pieces(text) if (made := _piece(piece, translate)) is not None]
    title, _, rest = "\n".join(_without_gaps(lines)).partition("\n")
    english = os.path.relpath(source, Path(PAGES[source]).parent)
    head = f"{title}\n\n<!-- made from {source} and {TABLE} -->\n\n[English]({english})\n"
    return (head + _LINK.sub(lambda link: _relinked(link, source), rest)).rstrip() + "\n"


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
        return f"{marks} {translate(title, not title.isupper())}"
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


def _relinked(link: re.Match[str], source: str) -> str:
    """A link as it is from the Chinese page: to a Chinese page where there is one."""
    path, anchor = link[1], link[2] or ""
    if "://" in path or not path:
        return link[0]
    target = os.path.normpath(Path(source).parent / path)
    place = target if anchor else PAGES.get(target, target)
    return f"]({os.path.relpath(place, Path(PAGES[source]).parent)}{anchor})"


def pages(texts: Mapping[str, str]) -> dict[str, str]:
    """Return every Chinese page by its place; a unit without translation is kept in English."""
    known = translations()
    made = {PAGES[name]: page(name, texts[name], lambda unit, _: translated(unit, known) or unit) for name in PAGES}
    if waiting := untranslated(DECLARED, texts[DECLARED]):
        made[PAGES[DECLARED]] += "\n## 尚无译文\n\n" + "".join(f"- {unit}\n" for unit in waiting)
    return made


def untranslated(source: str, text: str) -> list[str]:
    """Return the units of a page that need a translation and have none."""
    known = translations()
    return [unit for unit, needed in units(source, text).items() if needed and translated(unit, known) is None]


def units(source: str, text: str) -> dict[str, bool]:
    """Return every unit of a page, and whether it needs a translation."""
    found: dict[str, bool] = {}

    def note(unit: str, needed: bool) -> str:
        found[unit] = needed
        return unit

    page(source, text, note)
    return found
