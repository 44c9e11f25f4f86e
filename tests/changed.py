"""The tests that a change can reach: ``python -m tests.changed [REVISION]`` prints their files.

A module is reached when it has changed since REVISION (default: main), or imports a reached one, also inside a function or
by a name in a string (``"mindspeed.x.y:function"``). Tests are reached like modules; those of a feature also by its folder.
A change of what all tests share reaches all.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
SHARED: Final = ("tests/conftest.py", "tests/budgets.py", "tests/selection.py", "pyproject.toml", "constraints.txt", "Makefile")
_NAMED: Final = re.compile(r"(?:mindspeed|tests)(?:\.\w+)+")


def module_name(file: Path) -> str:
    """``tests/plugins/__init__.py`` is ``tests.plugins``."""
    return ".".join(file.with_suffix("").parts).removesuffix(".__init__")


def modules(root: Path = ROOT) -> dict[str, Path]:
    """Every module of the program and of its tests, with its file relative to the root."""
    files = (file.relative_to(root) for part in ("mindspeed", "tests") for file in (root / part).rglob("*.py"))
    return {module_name(file): file for file in files}


def names_in(source: str) -> Iterator[str]:
    """Dotted names that a source imports or has in a string."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from _NAMED.findall(node.value)


def importers(known: Mapping[str, Path], root: Path = ROOT) -> dict[str, set[str]]:
    """The modules that import each module."""
    found: dict[str, set[str]] = {name: set() for name in known}
    for name, file in known.items():
        for imported in names_in((root / file).read_text(encoding="utf-8")):
            if imported in known and imported != name:
                found[imported].add(name)
    return found


def reached(changed: Iterable[str], by: Mapping[str, set[str]]) -> set[str]:
    """The changed modules and all that import them, directly or not."""
    found: set[str] = set()
    todo = [name for name in changed if name in by]
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += by[name]
    return found


def reachable_tests(files: Iterable[str], root: Path = ROOT) -> list[str]:
    """The test files that changes of these files can reach."""
    files = list(files)
    if any(file in SHARED for file in files):
        return ["tests"]
    known = modules(root)
    names = reached((module_name(Path(file)) for file in files if file.endswith(".py")), importers(known, root))
    chosen = {known[name].as_posix() for name in names if known[name].name.startswith("test_")}
    for file in files:
        if found := re.match(r"(?:mindspeed|tests)/features/(\w+)/", file):
            chosen |= {path.relative_to(root).as_posix() for path in (root / "tests/features" / found[1]).glob("test_*.py")}
            chosen.add("tests/features/test_claims.py")
    return sorted(chosen)


def changed_files(revision: str) -> list[str]:
    """Files that differ from a revision, with new ones."""
    commands = (["diff", "--name-only", revision], ["ls-files", "--others", "--exclude-standard"])
    outputs = [subprocess.run(["git", *c], cwd=ROOT, capture_output=True, text=True, check=True).stdout for c in commands]
    return [line for output in outputs for line in output.splitlines()]


if __name__ == "__main__":
    print("\n".join(reachable_tests(changed_files(sys.argv[1] if len(sys.argv) > 1 else "main"))))
