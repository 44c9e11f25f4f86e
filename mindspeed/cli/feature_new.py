"""``mindspeed features new``: the files of a feature that works, with its tests, to be filled with an algorithm."""

from __future__ import annotations

import keyword
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Final

import click

from mindspeed._version import __version__
from mindspeed.cli.output import json_option, print_result
from mindspeed.problems import Fix, advice

if TYPE_CHECKING:
    from mindspeed.problems import Problem

TEMPLATES: Final = Path(__file__).with_name("templates")
KINDS: Final = {"patch": ("feature",), "hook": ("feature", "hook"), "op": ("feature", "op")}
"""Folders of templates with the code of a feature; a later one replaces files of an earlier one."""
_NAME: Final = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_SUFFIX: Final = ".template"


@dataclass(frozen=True, slots=True)
class FeatureLocation:
    """A place for a new feature: ``code`` is the folder of ``module``; the templates of ``tree`` go below ``root``.

    ``wrong`` has a text and a fix for everything that speaks against this place.
    """

    code: Path
    module: str
    tree: str
    root: Path
    steps: tuple[str, ...]
    wrong: tuple[tuple[str, str], ...] = ()


@click.command()
@click.argument("name")
@click.option(
    "--kind",
    type=click.Choice(tuple(KINDS)),
    default="patch",
    show_default=True,
    help="Kind of feature. patch = wraps a function of Megatron, hook = implements a hook, op = provides an operator",
)
@click.option("--package", is_flag=True, help="Create a separate distribution instead of a folder in mindspeed's sources")
@click.option(
    "--into",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="PACKAGE",
    help="Create the feature inside this folder of an existing package, with a test",
)
@click.option(
    "-o",
    "--output",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(),
    metavar="DIR",
    help="With --package: the new package is DIR/NAME. Otherwise DIR is the checkout of mindspeed  [default: .]",
)
@json_option
def new(name: str, kind: str, package: bool, into: Path | None, folder: Path) -> None:
    """Write the files of a new feature.

    The files are its declaration (feature.py), its algorithm, the code that patches Megatron, a README and tests. The
    new feature multiplies the output of each MLP by 1 (with --kind hook: each gradient), so training does not change and the
    tests pass. Replace the algorithm, the reference implementation with which the test compares it, and each text that
    begins with TODO: features test fails until then.
    """
    from mindspeed.files.text_files import write_files
    from mindspeed.problems import MindSpeedError, Problem

    if package and into is not None:
        raise click.UsageError("--package creates a distribution, but --into adds to an existing one; give only one of them")
    if problems := _name_problems(name):
        raise MindSpeedError(problems)
    place = _into(name, into) if into is not None else _package(name, folder) if package else _built_in(name, folder)
    files = _files(name, kind, place)
    wrong = place.wrong or [(f"{path} exists", "choose another name") for path in files if path.exists()]
    if wrong:
        raise MindSpeedError([Problem("MS106", text, (name,), fix=advice(fix)) for text, fix in wrong])
    write_files(files, fix="choose another -o DIR")
    lines = [*map(str, files), "", "next:", *(f"  {step}" for step in place.steps)]
    print_result({"name": name, "files": [str(path) for path in files], "next": list(place.steps)}, lines)


def _files(name: str, kind: str, place: FeatureLocation) -> dict[Path, str]:
    """Every file to write, with its text."""
    from mindspeed.workbench.conformance.outcome import TODO

    words = {
        "name": name,
        "package": _identifier(name),
        "module": place.module,
        "class_name": _class_name(name),
        "title": name.replace("-", " ").capitalize(),
        "version": __version__,
        "todo": TODO,
    }
    files = {}
    for tree, root in (*((tree, place.code) for tree in KINDS[kind]), (place.tree, place.root)):
        for file in sorted((TEMPLATES / tree).rglob(f"*{_SUFFIX}")):
            path = str(file.relative_to(TEMPLATES / tree)).removesuffix(_SUFFIX).replace("PACKAGE", words["package"])
            files[root / path] = Template(file.read_text(encoding="utf-8")).substitute(words)
    return files


def _package(name: str, folder: Path) -> FeatureLocation:
    """A distribution of its own in ``folder``."""
    root, module = folder / name, _identifier(name)
    wrong = []
    if find_spec(module) is not None:
        text = f"a package {module} can already be imported, and the new one would conflict with it"
        wrong.append((text, "choose another name, for example with a company prefix"))
    if root.exists() and any(root.iterdir()):
        wrong.append((f"{root} is not empty", "choose another -o DIR"))
    steps = (
        f"cd {root} && pip install -e .",
        f"write {module}/algorithm.py, then expected in tests/test_{module}.py",
        f"replace the texts that begin with TODO in {module}/feature.py",
        "pytest tests",
        f"mindspeed features test {name} --parity",
    )
    return FeatureLocation(root / module, module, "package", root, steps, tuple(wrong))


def _into(name: str, package: Path) -> FeatureLocation:
    """A folder inside an existing package, and its test."""
    folder, module = _identifier(name), f"{package.resolve().name}.{_identifier(name)}"
    steps = (
        f"""add {name} = "{module}.feature:{_class_name(name)}" to [project.entry-points."mindspeed.features"]""",
        f"add {module} where pyproject.toml lists packages, then pip install -e .",
        f"replace the texts that begin with TODO in {package.name}/{folder}/feature.py",
        f"pytest tests/test_{folder}.py",
        f"mindspeed features test {name} --parity",
    )
    is_package = (package / "__init__.py").is_file()
    wrong = () if is_package else ((f"{package} is not a package: it has no __init__.py", "--into FOLDER/PACKAGE"),)
    return FeatureLocation(package / folder, module, "package/tests", package.parent / "tests", steps, wrong)


def _built_in(name: str, checkout: Path) -> FeatureLocation:
    """A feature among mindspeed's own."""
    module = _identifier(name)
    features = checkout / "mindspeed" / "features"
    steps = (
        f"write mindspeed/features/{module}/algorithm.py, then expected in tests/features/{module}/test_algorithm.py",
        f"replace the texts that begin with TODO in mindspeed/features/{module}",
        f"make feature NAME={name}",
    )
    text, fix = f"{checkout.resolve()} is not a checkout of mindspeed", "-o CHECKOUT, or --package for a separate distribution"
    wrong = () if features.is_dir() else ((text, fix),)
    return FeatureLocation(features / module, f"mindspeed.features.{module}", "built_in", checkout, steps, wrong)


def _identifier(name: str) -> str:
    return name.replace("-", "_")


def _class_name(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("-"))


def _name_problems(name: str) -> list[Problem]:
    """A name that is malformed, a word of Python, or taken."""
    from mindspeed.plugins.found import installed
    from mindspeed.problems import Problem

    if not _NAME.fullmatch(name):
        text = f"the feature name {name!r} does not consist of lower-case words joined by dashes"
        return [Problem("MS106", text, (name,), fix=Fix.advise("use a name such as acme-z-loss"))]
    if keyword.iskeyword(name):
        text = f"{name!r} is a keyword of Python, so no module with that name can be imported"
        return [Problem("MS106", text, (name,), fix=Fix.advise(f"choose another name, as in acme-{name}"))]
    rows = [row for row in installed() if row.name == name]
    texts = {row.where: f"{row.distribution} {row.version} already provides a feature named {name}" for row in rows}
    return [
        Problem("MS106", text, (name,), where=where, fix=Fix.advise("choose another name")) for where, text in texts.items()
    ]
