"""``mindspeed features new``: the files of a feature, with tests that fail until its algorithm is written."""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping
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
    "--into",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="PACKAGE",
    help="a folder inside this folder of a package of yours, with a test beside it",
)
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
def new(name: str, package: bool, into: Path | None, folder: Path) -> None:
    """Write the files of a new feature.

    Declaration, algorithm, glue, README and tests. The tests fail until the algorithm is written, and say what to write.
    """
    from mindspeed.plugins.problems import MindSpeedError
    from mindspeed.plugins.text_files import write_files

    if package and into is not None:
        raise click.UsageError("--package makes a distribution, --into adds to one; give one of the two")
    destination = folder / name if package else folder
    files = _files_into(name, into) if into is not None else _files(name, package, destination)
    problems = _name_problems(name) or (
        _into_problems(name, into, files) if into else _problems(name, package, destination, files)
    )
    if problems:
        raise MindSpeedError(problems)
    write_files(files, fix="choose another -o DIR")
    steps = _next_into(name, into) if into is not None else _next(name, package, destination)
    if wants_json():
        print_json({"name": name, "files": [str(path) for path in files], "next": steps})
        return
    for path in files:
        click.echo(str(path))
    click.echo("\nnext:")
    for step in steps:
        click.echo(f"  {step}")


def _files(name: str, package: bool, destination: Path) -> dict[Path, str]:
    """Every file to write, with its text."""
    module = name.replace("-", "_")
    words = (
        _words(name, module, module)
        if package
        else _words(name, f"mindspeed.features.{module}", f"mindspeed/features/{module}")
    )
    tree = TEMPLATES / ("package" if package else "built_in")
    return {destination / path: text for path, text in _filled(tree, words).items()}


def _files_into(name: str, into: Path) -> dict[Path, str]:
    """The files of a feature in a folder of its own inside an existing package, and its test."""
    module = name.replace("-", "_")
    words = _words(name, f"{into.resolve().name}.{module}", f"{into}/{module}")
    code, test = _filled(TEMPLATES / "package" / "PACKAGE", words), _filled(TEMPLATES / "package" / "tests", words)
    files = {into / module / path: text for path, text in code.items() if path.suffix == ".py"}
    return files | {into.parent / "tests" / path: text for path, text in test.items()}


def _filled(tree: Path, words: Mapping[str, str]) -> dict[Path, str]:
    found = {}
    for file in sorted(tree.rglob(f"*{_SUFFIX}")):
        relative = str(file.relative_to(tree)).removesuffix(_SUFFIX).replace("PACKAGE", words["package"])
        found[Path(relative)] = Template(file.read_text(encoding="utf-8")).substitute(words)
    return found


def _words(name: str, module: str, folder: str) -> dict[str, str]:
    """Hold the values that the templates leave open."""
    return {
        "name": name,
        "package": name.replace("-", "_"),
        "module": module,
        "folder": folder,
        "class_name": "".join(word.capitalize() for word in name.split("-")),
        "title": name.replace("-", " ").capitalize(),
        "version": __version__,
    }


def _name_problems(name: str) -> list[Problem]:
    """A name that is malformed, a word of Python, or taken."""
    from mindspeed.plugins.found import installed
    from mindspeed.plugins.problems import Problem

    if not _NAME.fullmatch(name):
        return [Problem("MS106", f"{name!r} is not lower-case words joined by dashes", (name,), fix="as in acme-z-loss")]
    if keyword.iskeyword(name):
        text = f"{name!r} is a word of Python, so no module of that name can be imported"
        return [Problem("MS106", text, (name,), fix=f"choose another name, as in acme-{name}")]
    taken = [row for row in installed() if row.name == name]
    return [
        Problem(
            "MS106",
            f"the feature name {name} is taken by {row.distribution} {row.version}",
            (name,),
            where=row.where,
            fix="choose another name",
        )
        for row in taken
    ]


def _into_problems(name: str, into: Path, files: Mapping[Path, str]) -> list[Problem]:
    from mindspeed.plugins.problems import Problem

    if not (into / "__init__.py").is_file():
        return [Problem("MS106", f"{into} is no package: it has no __init__.py", (name,), fix="--into FOLDER/PACKAGE")]
    existing = [path for path in files if path.exists()]
    return [Problem("MS106", f"{path} exists", (name,), fix="choose another name") for path in existing]


def _next_into(name: str, into: Path) -> list[str]:
    words = _words(name, f"{into.resolve().name}.{name.replace('-', '_')}", "")
    return [
        f"""add {name} = "{words["module"]}.feature:{words["class_name"]}" to [project.entry-points."mindspeed.features"]""",
        f"add {words['module']} where pyproject.toml lists packages, then pip install -e .",
        f"pytest tests/test_{words['package']}.py",
        f"mindspeed features test {name} --parity",
    ]


def _problems(name: str, package: bool, destination: Path, files: dict[Path, str]) -> list[Problem]:
    from importlib.util import find_spec

    from mindspeed.plugins.problems import Problem

    problems = []
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
