"""Import statements of MindSpeed's names: as recorded in consumer_names.txt, or read from checkouts of its consumers.

``python -m tests.compat.consumers CHECKOUT ...`` prints the record of some checkouts. The record holds names alone.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

RECORD = Path(__file__).with_name("consumer_names.txt")


def recorded() -> dict[str, tuple[str, ...]]:
    """Modules, and the names that are taken from each."""
    rows = (line.partition(":") for line in RECORD.read_text(encoding="utf-8").splitlines())
    return {module: tuple(names.split()) for module, _, names in rows}


def statements(names: dict[str, tuple[str, ...]]) -> Iterator[str]:
    """Import statements of a record."""
    for module, taken in names.items():
        yield f"import {module}"
        yield from (f"from {module} import {name}" for name in taken)


def read(*checkouts: Path) -> dict[str, tuple[str, ...]]:
    """Read the record of checkouts from their sources."""
    names: dict[str, set[str]] = {}
    for file in (file for checkout in checkouts for file in checkout.rglob("*.py")):
        try:
            tree = ast.parse(file.read_text(encoding="utf-8", errors="replace"))
        except SyntaxError:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    names.setdefault(alias.name, set())
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                names.setdefault(node.module, set()).update(alias.name for alias in node.names)
    own = {name: taken for name, taken in sorted(names.items()) if f"{name}.".startswith("mindspeed.")}
    return {module: tuple(sorted(taken)) for module, taken in own.items()}


if __name__ == "__main__":
    for module, taken in read(*map(Path, sys.argv[1:])).items():
        sys.stdout.write(f"{module}: {' '.join(taken)}".rstrip() + "\n")
