"""Sample texts that users read, for a measurement of how many are understood: ``python -m tools.prose_sample [SEED]``.

The sample has a fixed number of texts of each kind. Two readers who did not write them and see no code judge each text:
understood at first reading, at the second, or not.
"""

from __future__ import annotations

import random
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tools.prose import NO_FIX, Text, texts

DOCS: Final = Path(__file__).parents[1] / "docs"
KINDS: Final = ["summary", "guide", "setting", "problem", "condition", "reason", "help", "hook", "data"]
SIZES: Final = dict(zip(KINDS, (10, 8, 8, 6, 6, 6, 8, 4, 4), strict=True))
"""Texts of each kind in a sample of 60."""


def guides() -> Iterator[Text]:
    """Yield the paragraphs of the guides that are written by hand."""
    for file in sorted(DOCS.glob("*.md")):
        page = file.read_text(encoding="utf-8")
        if "made by `make docs`" in page[:400]:
            continue
        for paragraph in re.sub(r"(?s)```.*?```|<!--.*?-->", "", page).split("\n\n"):
            if re.match(r"[A-Z`]", paragraph.strip()) and len(paragraph.split()) > 12:
                yield Text("guide", file.name, " ".join(paragraph.split()))


def sample(seed: int) -> list[Text]:
    """Return the sample of a seed, kind by kind."""
    found: dict[str, list[Text]] = defaultdict(list)
    for text in {text.text: text for text in (*texts(), *guides())}.values():
        found[text.kind].append(text)
    draw = random.Random(seed)
    return [text for kind, size in SIZES.items() for text in draw.sample(sorted(found[kind]), size)]


def main() -> None:
    """Print the sample, numbered."""
    for number, text in enumerate(sample(int(sys.argv[1]) if len(sys.argv) > 1 else 0), 1):
        print(f"{number}. [{text.kind}] {' '.join(text.text.replace(NO_FIX, '').split())}")


if __name__ == "__main__":
    main()
