"""The pages of the site in one folder: ``python -m tools.docs.site FOLDER``.

The site has the pages of ``docs/``, those that lie elsewhere in the repository, and the examples that pages link to. Links
between them lead to their new places, so that one configuration serves every builder that reads ``mkdocs.yml``.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
DOCS: Final = ROOT / "docs"
ELSEWHERE: Final[Mapping[str, str]] = {
    "CHANGELOG.md": "changelog.md",
    "CODE_OF_CONDUCT.md": "code-of-conduct.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "README.md": "index.md",
    "README.zh.md": "zh/index.md",
    "LICENSE": "LICENSE",
    "benchmarks/README.md": "benchmarks.md",
    "benchmarks/accelerator/README.md": "accelerator-benchmarks.md",
}
_LINK: Final = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")
_FENCED: Final = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)


def assemble(folder: Path) -> None:
    """Write every page and file of the site into ``folder``, which is made anew. Raises ValueError for a link to nowhere."""
    shutil.rmtree(folder, ignore_errors=True)
    for source, place in _sources():
        target = folder / place
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix == ".md":
            target.write_text(relinked(source.read_text(encoding="utf-8"), source, place), encoding="utf-8")
        else:
            shutil.copyfile(source, target)


def _sources() -> Iterator[tuple[Path, str]]:
    """Yield each file with its place in the site."""
    for source in sorted(path for path in DOCS.rglob("*") if path.is_file()):
        yield source, source.relative_to(DOCS).as_posix()
    for name, place in ELSEWHERE.items():
        if not name.startswith("README"):  # the site has home pages of its own
            yield ROOT / name, place
    for source in sorted(path for path in (ROOT / "examples").rglob("*") if path.is_file() and "__pycache__" not in path.parts):
        yield source, source.relative_to(ROOT).as_posix()


def relinked(text: str, source: Path, place: str) -> str:
    """The text of a page with its links as they are from ``place``; code is left alone."""

    def link(found: re.Match[str]) -> str:
        path = found[2]
        if "://" in path or path.startswith("mailto:"):
            return found[0]
        there = _place((source.parent / path).resolve())
        return f"{found[1]}{os.path.relpath(there, Path(place).parent)}{found[3] or ''}{found[4]}"

    return "".join(part if part.startswith("```") else _LINK.sub(link, part) for part in _FENCED.split(text))


def _place(target: Path) -> str:
    """Where the site has a file of the repository."""
    if target.is_relative_to(DOCS):
        return target.relative_to(DOCS).as_posix()
    name = target.relative_to(ROOT).as_posix()
    if name in ELSEWHERE:
        return ELSEWHERE[name]
    if name.startswith("examples/") and target.is_file():
        return name
    raise ValueError(f"a page links to {name}, which is not in the site")


if __name__ == "__main__":
    assemble(Path(sys.argv[1]))
