"""Options that a training script registers itself, read from its source and from the modules that it imports. Light."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Final, NamedTuple

_MAX_BYTES: Final = 2_000_000


class _Source(NamedTuple):
    """The modules that a file may import, and the options that it registers."""

    imported: frozenset[str] = frozenset()
    registered: frozenset[str] = frozenset()


def script_options(program: str, source: Path, checkout: Path | None) -> frozenset[str]:
    """Return the options in ``add_argument`` calls of a script and of its direct imports; none where it is not found.

    The script is looked up as it is written, then in the checkout, then beside the file ``source`` that launches it.
    """
    roots = [checkout] if checkout is not None else []
    name = Path(program).name
    candidates = [Path(program), *(root / one for root in roots for one in (program, name)), source.parent / name]
    script = next((path for path in candidates if path.is_file()), None)
    if script is None:
        return frozenset()
    read = _read(script)
    modules = {file for name in read.imported if (file := _file_of(name, [script.parent, *roots])) is not None}
    return read.registered.union(*(_read(module, holding="add_argument").registered for module in modules))


def _read(file: Path, holding: str = "") -> _Source:
    """Read a file that holds a text, again after each change; nothing is found in one that does not, or cannot be read."""
    try:
        status = file.stat()
        return _parsed(file.resolve(), holding, status.st_mtime_ns, status.st_size)
    except (OSError, SyntaxError, ValueError, RecursionError):
        return _Source()


@lru_cache(maxsize=1024)
def _parsed(file: Path, holding: str, changed: int, size: int) -> _Source:
    """Parse a file as it is since it was ``changed``."""
    text = file.read_text(encoding="utf-8", errors="replace") if size <= _MAX_BYTES else ""
    tree = ast.parse(text if holding in text else "")
    return _Source(frozenset(imported_names(tree)), frozenset(registered_options(tree)))


def imported_names(tree: ast.Module) -> Iterator[str]:
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


def registered_options(tree: ast.Module) -> Iterator[str]:
    """Yield the options that ``add_argument`` gets as text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            names = (argument.value for argument in node.args if isinstance(argument, ast.Constant))
            yield from (name for name in names if isinstance(name, str) and name.startswith("--"))
