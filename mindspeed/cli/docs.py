"""``mindspeed docs``: the guides, and the pages that are made from what is installed."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from gettext import gettext
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from mindspeed.cli.output import json_option, print_result
from mindspeed.cli.request_options import FeatureNames, JobCommand, names_option, spelled_names
from mindspeed.problems import suggestion

if TYPE_CHECKING:
    from mindspeed.plugins.discovery import Catalog
    from mindspeed.workbench.pages.reference import MadePage
    from mindspeed.workbench.verification.matrix.verdicts import CaseResult

PAGES: Final = Path(__file__).parents[1] / "pages"
"""A link to the guides of ``docs/`` in a checkout; the wheel of a release has the made pages there as well."""
_CHINESE: Final = "zh/"
"""What the names of Chinese pages begin with."""


def _page_names(ctx: click.Context, parameter: click.Parameter, words: tuple[str, ...]) -> tuple[str, ...]:
    """Read names of pages, each of which may be the path of its file."""
    return spelled_names(map(_page_name, words))


def _page_name(word: str) -> str:
    path = Path(word)
    is_file = word.endswith(".md")
    return f"{_CHINESE}{path.stem}" if is_file and path.parent.name == "zh" else path.stem if is_file else word


@click.command()
@click.argument("names", metavar="[PAGE]...", nargs=-1, type=FeatureNames(), callback=_page_names)
@names_option("--features", help="Print the pages of these features")
@click.option("--write", "folder", type=click.Path(file_okay=False, path_type=Path), help="Write every page into this folder")
@click.option("--built-in", is_flag=True, help="Skip features of other packages")
@json_option
def docs(names: tuple[str, ...], features: tuple[str, ...], folder: Path | None, built_in: bool) -> None:
    """Print pages of the documentation, or write the whole reference.

    PAGE is the name of a guide, such as install, or of a feature. Without a name, all guides are listed. The page of a
    feature is generated from its declaration, also for features of other packages. zh/PAGE is the Chinese page.
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


def _guides() -> dict[str, Path]:
    return {page.stem: page for page in sorted(PAGES.glob("*.md"))}


def _list_guides() -> None:
    """Print the name and the title of every guide and of every page of reference."""
    from mindspeed.workbench.pages.chinese import SOURCES, chinese_title

    titles = {name: made.title for name, made in reference().items() if "/" not in name}
    titles |= {name: page.read_text("utf-8").partition("\n")[0].removeprefix("# ") for name, page in _guides().items()}
    titles |= {name: chinese_title(title) for name, source in SOURCES.items() if (title := titles.get(source))}
    width = max(map(len, titles))
    rows = [f"{name:{width}}  {title}" for name, title in sorted(titles.items())]
    hint = gettext("mindspeed docs PAGE prints one; PAGE may also be the name of a feature.")
    print_result({"titles": dict(sorted(titles.items()))}, [*rows, "", hint])


def _texts(names: Sequence[str], built_in: bool) -> dict[str, str]:
    """The text of each page. Raises UsageError for an unknown name, and MindSpeedError for a feature that does not load."""
    from mindspeed.plugins.discovery import discover
    from mindspeed.problems import MindSpeedError
    from mindspeed.workbench.pages.chinese import SOURCES

    made = reference()
    pages = {*_guides(), *made, *SOURCES}
    wanted = [name for name in names if name not in pages]
    some = wanted if made.keys().isdisjoint(names) else None
    catalog = discover(only=() if built_in or some == [] else some)
    if broken := [row.problem for name, row in catalog.broken.items() if name in wanted and row.problem is not None]:
        raise MindSpeedError(broken)
    if unknown := [name for name in wanted if name not in catalog.usable]:
        alike = [page for page in pages if page.startswith(_CHINESE) == unknown[0].startswith(_CHINESE)]
        near = difflib.get_close_matches(unknown[0], alike, n=2, cutoff=0.7) + catalog.near(unknown[0])
        where = "mindspeed docs lists every guide, mindspeed features list every feature"
        raise click.UsageError(f"no guide or feature is named {', '.join(unknown)}; {suggestion(near, where)}")
    return {name: _text(name, catalog) for name in names}


def _text(name: str, catalog: Catalog) -> str:
    """The page that lies in the package, else the one that is made from what is installed."""
    from mindspeed.workbench.pages import chinese

    if file := next((file for file in (PAGES / f"{name}.md", PAGES / "features" / f"{name}.md") if file.is_file()), None):
        return file.read_text("utf-8")
    if source := chinese.SOURCES.get(name):
        return chinese.printed_page(f"{source}.md", _text(source, catalog))
    if made := reference().get(name):
        return made.text(catalog)
    from mindspeed.workbench.pages.features import feature_page

    return feature_page(catalog.usable[name], _verdicts(), catalog.categories)


def _verdicts() -> Mapping[str, CaseResult]:
    """The verdicts of the matrix that the release has."""
    from mindspeed.workbench.verification.matrix.page import published

    return published(PAGES / "matrix.json")


def _write(folder: Path, built_in: bool) -> None:
    """Write the whole reference. Raises MindSpeedError where a built-in feature does not load: its page would be removed."""
    from mindspeed.files.text_files import write_files
    from mindspeed.plugins.discovery import BUILT_IN, discover
    from mindspeed.problems import MindSpeedError
    from mindspeed.workbench.pages.features import feature_page

    catalog = discover(only=() if built_in else None)
    if broken := [row.problem for row in catalog.broken.values() if row.distribution == BUILT_IN and row.problem]:
        raise MindSpeedError(broken)
    texts = {f"{name}.md": made.text(catalog) for name, made in reference().items()}
    verdicts = _verdicts()
    texts |= {f"features/{name}.md": feature_page(row, verdicts, catalog.categories) for name, row in catalog.usable.items()}
    write_files({folder / name: text for name, text in texts.items()}, fix="choose another --write FOLDER")
    for old in (folder / "features").glob("*.md"):
        if f"features/{old.name}" not in texts:
            old.unlink()


def reference() -> Mapping[str, MadePage]:
    """The pages of reference by name, with the help of every verb."""
    from mindspeed.workbench.pages.reference import REFERENCE, MadePage

    return REFERENCE | {"cli": MadePage("Command line", "mindspeed/cli", lambda catalog: _verbs())}


def _verbs() -> Iterator[list[str]]:
    """Yield the help of every verb."""
    from mindspeed.cli import main

    for name, text in _helps(main, "mindspeed", None):
        yield [f"## {name}", "", f"```\n{text}\n```"]


def _helps(command: click.Command, name: str, parent: click.Context | None) -> Iterator[tuple[str, str]]:
    if isinstance(command, JobCommand) and name != "check":  # one list of the job's options on the page
        command = copy(command)
        command.lists_sizes = False
    # as a call makes it: a bare Context knows nothing of the command's own settings, such as -h
    context = command.make_context(name, [], parent, resilient_parsing=True, terminal_width=100, max_content_width=100)
    yield context.command_path, "\n".join(line.rstrip() for line in command.get_help(context).splitlines())
    if isinstance(command, click.Group):
        for verb in command.list_commands(context):
            below = command.get_command(context, verb)
            if below is not None and not below.hidden:
                yield from _helps(below, verb, context)
