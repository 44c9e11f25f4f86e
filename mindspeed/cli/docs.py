"""``mindspeed docs``: the reference pages, made from what is installed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

import click

from mindspeed.cli.output import json_option, print_result
from mindspeed.cli.request_options import names_argument, names_option
from mindspeed.plugins.fixes import Advice
from mindspeed.plugins.near_names import suggestion

CHECKOUT: Final = Path(__file__).parents[2]


@click.command()
@names_argument("[FEATURE]...")
@names_option("--features", help="the same features as an option")
@click.option("--write", "folder", type=click.Path(file_okay=False, path_type=Path), help="write every page into this folder")
@click.option("--built-in", is_flag=True, help="leave out the features of other packages")
@json_option
def docs(names: tuple[str, ...], features: tuple[str, ...], folder: Path | None, built_in: bool) -> None:
    """Print the pages of features, or write the whole reference.

    The pages are made from the declarations: settings, constraints, patches with their reasons, numerics, platforms.
    Features of other packages have pages too.
    """
    from mindspeed.cli import main
    from mindspeed.plugins.discovery import BUILT_IN, discover
    from mindspeed.plugins.problems import MindSpeedError

    names = (*names, *features)
    if bool(names) == (folder is not None):
        raise click.UsageError("name features to print their pages, or give --write FOLDER for all pages")
    catalog = discover(only=() if built_in else names or None)
    if unknown := [name for name in names if name not in catalog.usable]:
        near = suggestion(catalog.near(unknown[0]), "mindspeed features list shows every name")
        raise click.UsageError(f"there is no feature {', '.join(unknown)}; {near}")
    _require_generators()
    from tools.docs.features import feature_page
    from tools.docs.pages import pages, write

    if folder is not None:
        # pages of features that do not load at the moment would be taken for those of features that are no more
        if broken := [row.problem for row in catalog.broken.values() if row.distribution == BUILT_IN and row.problem]:
            raise MindSpeedError(broken)
        write(folder, pages(catalog, main))
        return
    texts = {name: feature_page(catalog.usable[name]) for name in names}
    print_result({"pages": texts}, ["\n".join(texts.values()).removesuffix("\n")])


def _require_generators() -> None:
    """Make ``tools.docs`` importable whatever the working directory. Raises PlatformError (MS501) outside a checkout."""
    from mindspeed.plugins.problems import PlatformError, Problem

    if not (CHECKOUT / "tools" / "docs" / "pages.py").is_file():
        text = "pages are made by tools/docs, which a checkout of mindspeed has and an installed package has not"
        raise PlatformError([Problem("MS501", text, fix=Advice("run mindspeed docs of a checkout: pip install -e . there"))])
    if str(CHECKOUT) not in sys.path:
        sys.path.insert(0, str(CHECKOUT))
