"""Every page in one folder: ``python -m tools.docs.site FOLDER``, from which the site and the wheel of a release are built.

The settings of the site lie beside it: those of ``mkdocs.yml``, with the pages of features in the navigation.

The folder has the guides of ``docs/``, the pages that lie elsewhere in the repository, those that are made from the code, and
the examples that pages link to. A guide links to what a made page is made from, such as the README of a feature, and to files
of the repository. Here these links lead to the pages.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import yaml

from mindspeed.cli.docs import reference
from mindspeed.files.text_files import write_files
from mindspeed.plugins import Category
from mindspeed.plugins.discovery import Catalog, discover
from mindspeed.workbench.pages import chinese
from mindspeed.workbench.pages.features import feature_page
from mindspeed.workbench.pictures.drawing import svg
from mindspeed.workbench.verification.matrix.page import as_json, html, published, summary
from mindspeed.workbench.verification.matrix.reach import Sources
from tools.docs import exposed, migration_guide
from tools.docs.effects_picture import effects_picture
from tools.docs.figures import lines_of, pictures_of
from tools.docs.guards import GUARDS
from tools.docs.lint import LINT
from tools.docs.plan_picture import plan_picture

ROOT: Final = Path(__file__).resolve().parents[2]
DOCS: Final = ROOT / "docs"
FEATURES: Final = "mindspeed/features/"
SETTINGS: Final = ROOT / "mkdocs.yml"
FEATURES_TAB: Final = "Features"
MATRIX: Final = ROOT / "build" / "matrix"
"""Where ``mindspeed features matrix page`` writes the verdicts of a run."""
ELSEWHERE: Final[Mapping[str, str]] = {
    "CHANGELOG.md": "changelog.md",
    "CODE_OF_CONDUCT.md": "code-of-conduct.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "LICENSE": "LICENSE",
    "benchmarks/README.md": "benchmarks.md",
    "benchmarks/accelerator/README.md": "accelerator-benchmarks.md",
}
"""Files of the repository that are pages, with their places."""
MADE: Final = {**reference(), "lint": LINT, "guards": GUARDS}
"""The pages that are no feature's and have one source."""
PLACES: Final = {
    **ELSEWHERE,
    "README.md": "index.md",
    chinese.TABLE: "zh/index.md",
    **{page.source: f"{name}.md" for name, page in MADE.items()},
}
_LINK: Final = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")
_PICTURE: Final = re.compile(r"<!-- picture: (\S+) (.*) -->")
_FENCED: Final = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)


def assemble(folder: Path) -> None:
    """Write every page and file into ``folder``, which is made anew. Raises ValueError for a link to nowhere."""
    shutil.rmtree(folder, ignore_errors=True)
    for source, place in _files():
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, folder / place)
    known = discover(only=())
    written = {folder / place: text for place, text in texts(known).items()}
    written[folder.with_name(SETTINGS.name)] = settings(known, folder)
    write_files(written, fix="choose another FOLDER")


def settings(known: Catalog, folder: Path) -> str:
    """Return the settings of the site of a folder."""
    nav = yaml.safe_load(SETTINGS.read_text(encoding="utf-8"))["nav"]
    (tab,) = (entry[FEATURES_TAB] for entry in nav if FEATURES_TAB in entry)
    for category in Category:
        if names := [name for name, spec in known.specs.items() if spec.category is category]:
            tab.append({category.value: [{name: f"features/{name}.md"} for name in names]})
    parent = os.path.relpath(SETTINGS, folder.parent)
    return yaml.safe_dump({"INHERIT": parent, "docs_dir": folder.name, "site_dir": "site", "nav": nav}, sort_keys=False)


def _files() -> Iterator[tuple[Path, str]]:
    """Yield each file that is copied as it is, with its place."""
    yield ROOT / "LICENSE", "LICENSE"
    yield from ((file, file.relative_to(DOCS).as_posix()) for file in sorted(DOCS.glob("assets/*")))
    for source in sorted(path for path in (ROOT / "examples").rglob("*") if path.is_file() and "__pycache__" not in path.parts):
        if source.suffix != ".md":
            yield source, source.relative_to(ROOT).as_posix()


def texts(known: Catalog) -> dict[str, str]:
    """Return every page and picture by its place."""
    found = guides(known)
    found |= {f"{name}.md": page.text(known) for name, page in MADE.items()}
    verdicts = published(MATRIX / "matrix.json")
    for name, row in known.usable.items():
        pictures = [*pictures_of(name), *exposed.picture_of(name)]
        shown = [f"![{picture.title}]({picture.name}.svg)\n\n{picture.text}" for picture in pictures]
        shown += [*lines_of(name), *exposed.lines_of(name)]
        found[f"features/{name}.md"] = feature_page(row, verdicts, known.categories, shown)
        found |= {f"features/{picture.name}.svg": svg(picture) for picture in pictures}
    found["plan.svg"] = svg(plan_picture())
    found["effects.svg"] = svg(effects_picture(found["index.md"]))
    return found | _matrix(known) | chinese.pages(found)


def _matrix(known: Catalog) -> dict[str, str]:
    """The matrix as a run has left it, else one without a verdict."""
    if (MATRIX / "matrix.json").exists():
        return {file.name: file.read_text(encoding="utf-8") for file in MATRIX.glob("matrix.*")}
    data = summary({}, known, Sources(known))
    return {"matrix.html": html(data), "matrix.json": as_json(data)}


def guides(known: Catalog) -> dict[str, str]:
    """Return every page that is written by hand by its place, with its links as they are from there."""
    files = {f"docs/{file.name}": file.name for file in sorted(DOCS.glob("*.md"))}
    files |= {name: place for name, place in ELSEWHERE.items() if name.endswith(".md")}
    files |= {name: name for file in sorted(ROOT.glob("examples/**/*.md")) if (name := file.relative_to(ROOT).as_posix())}
    found = {}
    for name, place in files.items():
        text = relinked((ROOT / name).read_text(encoding="utf-8"), ROOT / name, place)
        found[place] = _PICTURE.sub(r"![\2](\1)", text)
    return found | {migration_guide.PAGE: migration_guide.filled(found[migration_guide.PAGE], known)}


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
    """Return where the site has a file or a folder of the repository. Raises ValueError where it does not."""
    name = target.relative_to(ROOT).as_posix()
    if name in PLACES:
        return PLACES[name]
    if name.startswith(FEATURES) and name.endswith("/README.md"):
        return f"features/{target.parent.name.replace('_', '-')}.md"
    if target.is_file() and target.is_relative_to(DOCS):
        return target.relative_to(DOCS).as_posix()
    if target.is_file() and name.startswith("examples/"):
        return name
    raise ValueError(f"a page links to {name}, which is not in the site")


if __name__ == "__main__":
    assemble(Path(sys.argv[1]))
