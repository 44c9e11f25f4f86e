"""What a page consists of, read by Python's parser of HTML: sections, figures with their texts, and what it loads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from html.parser import HTMLParser

_LOADS = ("src", "href", "xlink:href", "srcset", "data", "poster")


class PageStructure(HTMLParser):
    """The structure of one page. ``figures`` has the texts of each drawing by the title of its figure."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.sections: list[str] = []
        self.figures: dict[str, list[str]] = {}
        self.pictures: list[list[str]] = []
        self.loaded: list[str] = re.findall(r"@import[^;]*|url\((?!#)[^)]*\)", text)
        self.tags: set[str] = set()
        self.has_dark_scheme = "prefers-color-scheme: dark" in text and "color-scheme: light dark" in text
        self._open: list[str] = []
        self._title = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.loaded += [value for name, value in attrs if name in _LOADS and value and not value.startswith("#")]
        if tag not in ("meta", "br", "link", "img"):
            self._open.append(tag)
        if tag == "svg" and self._open.count("svg") == 1:
            self.pictures.append([])

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loaded += [value for name, value in attrs if name in _LOADS and value and not value.startswith("#")]

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        text = data.strip()
        if not text or not self._open:
            return
        if self._open[-1] in ("h2", "summary"):
            self.sections.append(text)
        elif self._open[-1] == "b" and "figcaption" in self._open:
            self._title = text
            self.figures[text] = []
        elif "svg" in self._open and "style" not in self._open:
            self.pictures[-1].append(text)
            if "figure" in self._open:
                self.figures[self._title].append(text)


def charts_without_units(figures: Mapping[str, list[str]]) -> list[str]:
    """Return the titles of charts that lack the label of an axis or its unit; steps have none."""
    found = []
    for title, texts in figures.items():
        labels = [text for text in texts if text == "step" or re.search(r"\((?!s\))[^)]+\)$|\(s\)$", text)]
        if len(labels) < 2:
            found.append(title)
    return found
