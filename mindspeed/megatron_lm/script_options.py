"""Options that a training script registers itself, read from its source and from the modules that it imports. Light."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Final

_MAX_BYTES: Final = 2_000_000


@lru_cache(maxsize=256)
def script_options(program: str, source: Path, checkout: Path | None) -> frozenset[str]:
    """Return the options in ``add_argument`` calls of a script and of its direct imports; none where it is not found.

    The script is looked up as it is written, then in the checkout, then beside the file ``source`` that launches it.
    """
    roots = [checkout] if checkout is not None else []
    name = Path(program).name
    candidates = [Path(program), *(root / one for root in roots for one in (program, name)), source.parent / name]
    script = next((path for path in candidates if path.is_file()), None)
    if script is None or (tree := _parsed(script)) is None:
        return frozenset()
    modules = {file for name in _imported(tree) if (file := _file_of(name, [script.parent, *roots])) is not None}
    trees = [tree, *filter(None, (_parsed(module, holding="add_argument") for module in sorted(modules)))]
    return frozenset(option for one in trees for option in _registered(one))


def _parsed(file: Path, holding: str = "") -> ast.Module | None:
    """Parse a file that holds a text; None where it does not, or cannot be read."""
    try:
        if file.stat().st_size > _MAX_BYTES:
            return None
        text = file.read_text(encoding="utf-8", errors="replace")
        return ast.parse(text) if holding in text else None
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None


def _imported(tree: ast.Module) -> Iterator[str]:
    """Yield the dotted names of modules that a script may import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _file_of(module: str, roots: list[Path]) -> Path | None:
    files = (root.joinpath(*module.split(".")).with_suffix(".py") for root in roots)
    return next((file for file in files if file.is_file()), None)


def _registered(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            names = (argument.value for argument in node.args if isinstance(argument, ast.Constant))
            yield from (name for name in names if isinstance(name, str) and name.startswith("--"))
