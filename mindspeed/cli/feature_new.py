"""``mindspeed features new``: the files of a feature, with tests that fail until its algorithm is written."""

from __future__ import annotations

import re
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Final

import click

from mindspeed._version import __version__
from mindspeed.cli.output import json_option, print_json, wants_json

if TYPE_CHECKING:
    from mindspeed.plugins.problems import Problem

TEMPLATES: Final = Path(__file__).with_name("templates")
_NAME: Final = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_SUFFIX: Final = ".template"


@click.command()
@click.argument("name")
@click.option("--package", is_flag=True, help="a distribution of its own, instead of a folder in mindspeed's sources")
@click.option(
    "-o",
    "--output",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(),
    metavar="DIR",
    help="a package is made in DIR/NAME; DIR is mindspeed's checkout otherwise  [default: .]",
)
@json_option
def new(name: str, package: bool, folder: Path) -> None:
    """Write the files of a new feature.

    Declaration, algorithm, glue, README and tests. The tests fail until the algorithm is written, and say what to write.
    """
    from mindspeed.plugins.problems import MindSpeedError
    from mindspeed.plugins.text_files import write_files

    destination = folder / name if package else folder
    files = _files(name, package, destination)
    problems = _problems(name, package, destination, files)
    if problems:
        raise MindSpeedError(problems)
    write_files(files, fix="choose another -o DIR")
    if wants_json():
        print_json({"name": name, "files": [str(path) for path in files], "next": _next(name, package, destination)})
        return
    for path in files:
        click.echo(str(path))
    click.echo("\nnext:")
    for step in _next(name, package, destination):
        click.echo(f"  {step}")


def _files(name: str, package: bool, destination: Path) -> dict[Path, str]:
    """Every file to write, with its text."""
    module = name.replace("-", "_")
    words = {
        "name": name,
        "package": module,
        "module": module if package else f"mindspeed.features.{module}",
        "folder": module if package else f"mindspeed/features/{module}",
        "class_name": "".join(word.capitalize() for word in name.split("-")),
        "title": name.replace("-", " ").capitalize(),
        "version": __version__,
    }
    tree = TEMPLATES / ("package" if package else "built_in")
    found = {}
    for file in sorted(tree.rglob(f"*{_SUFFIX}")):
        relative = str(file.relative_to(tree)).removesuffix(_SUFFIX).replace("PACKAGE", module)
        found[destination / relative] = Template(file.read_text(encoding="utf-8")).substitute(words)
    return found


def _problems(name: str, package: bool, destination: Path, files: dict[Path, str]) -> list[Problem]:
    from importlib.util import find_spec

    from mindspeed.plugins.found import installed
    from mindspeed.plugins.problems import Problem

    if not _NAME.fullmatch(name):
        return [Problem("MS106", f"{name!r} is not lower-case words joined by dashes", (name,), fix="as in acme-z-loss")]
    problems = []
    for row in installed():
        if row.name == name:
            text = f"the feature name {name} is taken by {row.distribution} {row.version}"
            problems.append(Problem("MS106", text, (name,), where=row.where, fix="choose another name"))
    module = name.replace("-", "_")
    if package and find_spec(module) is not None:
        text = f"a package {module} can be imported already, which a new one would hide or be hidden by"
        problems.append(Problem("MS106", text, (name,), fix="choose another name, as with your company before it"))
    if package and destination.exists() and any(destination.iterdir()):
        problems.append(Problem("MS106", f"{destination} is not empty", (name,), fix="choose another -o DIR"))
    if not package and not (destination / "mindspeed" / "features").is_dir():
        text = f"{destination.resolve()} is no checkout of mindspeed"
        problems.append(Problem("MS106", text, (name,), fix="-o CHECKOUT, or --package for a distribution of your own"))
    if not package:
        existing = [str(path) for path in files if path.exists()]
        problems += [Problem("MS106", f"{path} exists", (name,), fix="choose another name") for path in existing]
    return problems


def _next(name: str, package: bool, destination: Path) -> list[str]:
    module = name.replace("-", "_")
    if package:
        return [
            f"cd {destination} && pip install -e .",
            f"write {module}/algorithm.py, then expected in tests/test_{module}.py",
            "pytest tests",
            f"mindspeed features test {name} --parity",
        ]
    return [
        f"write mindspeed/features/{module}/algorithm.py, then expected in tests/features/{module}/test_algorithm.py",
        f"pytest tests/features/{module}",
        f"mindspeed features test {name} --parity",
    ]
