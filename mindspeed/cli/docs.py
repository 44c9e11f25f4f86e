"""``mindspeed docs``: the pages of the documentation, and the reference made from what is installed."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from mindspeed.cli.output import json_option, print_result
from mindspeed.cli.request_options import names_argument, names_option
from mindspeed.problems.fixes import Fix
from mindspeed.problems.near_names import suggestion

if TYPE_CHECKING:
    from mindspeed.plugins.discovery import Catalog

CHECKOUT: Final = Path(__file__).parents[2]
PAGES: Final = Path(__file__).parents[1] / "pages"
"""A link to ``docs/`` in a checkout, and its pages in an installed package."""


@click.command()
@names_argument("[PAGE]...")
@names_option("--features", help="Print the pages of these features")
@click.option("--write", "folder", type=click.Path(file_okay=False, path_type=Path), help="Write every page into this folder")
@click.option("--built-in", is_flag=True, help="Skip features of other packages")
@json_option
def docs(names: tuple[str, ...], features: tuple[str, ...], folder: Path | None, built_in: bool) -> None:
    """Print pages of the documentation, or write the whole reference.

    PAGE is the name of a guide, such as install, or of a feature. Without a name, all guides are listed. The page of a
    feature is generated from its declaration, also for features of other packages.
    """
    names = (*names, *features)
    if folder is not None:
        if names:
            raise click.UsageError("give names of pages to print them, or --write FOLDER to write all pages")
        _write(folder, built_in)
    elif not names:
        _list_guides()
    else:
        texts = _texts(names, built_in)
        print_result({"pages": texts}, ["\n".join(texts.values()).removesuffix("\n")])


def _list_guides() -> None:
    """Print the name and the title of every guide."""
    pages = sorted(PAGES.glob("*.md"))
    titles = {page.stem: page.read_text("utf-8").partition("\n")[0].removeprefix("# ") for page in pages}
    width = max(map(len, titles), default=0)
    rows = [f"{name:{width}}  {title}" for name, title in titles.items()]
    print_result({"titles": titles}, [*rows, "", "mindspeed docs PAGE prints one; PAGE may also be the name of a feature."])


def _texts(names: Sequence[str], built_in: bool) -> dict[str, str]:
    """The text of each page. Raises UsageError for a name that is neither a guide nor a feature."""
    from mindspeed.plugins.discovery import discover

    guides = {page.stem: page for page in PAGES.glob("*.md")}
    wanted = [name for name in names if name not in guides]
    catalog = discover(only=() if built_in or not wanted else wanted)
    if unknown := [name for name in wanted if name not in catalog.usable]:
        near = difflib.get_close_matches(unknown[0], guides, n=2, cutoff=0.7) + catalog.near(unknown[0])
        where = "mindspeed docs lists every guide, mindspeed features list every feature"
        raise click.UsageError(f"no guide or feature is named {', '.join(unknown)}; {suggestion(near, where)}")
    return {name: guides[name].read_text("utf-8") if name in guides else _feature_page(catalog, name) for name in names}


def _feature_page(catalog: Catalog, name: str) -> str:
    """The page of a feature: made from its declaration in a checkout, the one of the package otherwise."""
    packaged = PAGES / "features" / f"{name}.md"
    if not _has_generators() and packaged.is_file():
        return packaged.read_text(encoding="utf-8")
    _require_generators()
    from tools.docs.features import feature_page

    return feature_page(catalog.usable[name])


def _write(folder: Path, built_in: bool) -> None:
    """Write the whole reference. Raises MindSpeedError where a built-in feature does not load: its page would be removed."""
    from mindspeed.cli import main
    from mindspeed.plugins.discovery import BUILT_IN, discover
    from mindspeed.problems.problem import MindSpeedError

    catalog = discover(only=() if built_in else None)
    _require_generators()
    from tools.docs.pages import pages, write

    if broken := [row.problem for row in catalog.broken.values() if row.distribution == BUILT_IN and row.problem]:
        raise MindSpeedError(broken)
    write(folder, pages(catalog, main))


def _has_generators() -> bool:
    return (CHECKOUT / "tools" / "docs" / "pages.py").is_file()


def _require_generators() -> None:
    """Make ``tools.docs`` importable whatever the working directory. Raises PlatformError (MS501) outside a checkout."""
    from mindspeed.problems.problem import PlatformError, Problem

    if not _has_generators():
        text = "documentation of a feature from another package can only be generated in a checkout of mindspeed"
        fix = Fix.advise("in a checkout of mindspeed: pip install -e ., then run this command again")
        raise PlatformError([Problem("MS501", text, fix=fix)])
    if str(CHECKOUT) not in sys.path:
        sys.path.insert(0, str(CHECKOUT))
