"""List the flags that a MindSpeed or MindSpeed-LLM checkout registers: ``python -m tools.registered_flags CHECKOUT``."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

_PLACES = (
    "mindspeed/features_manager",
    "mindspeed/arguments.py",
    "mindspeed_llm/features_manager",
    "mindspeed_llm/training/arguments.py",
)


def registered_flags(checkout: Path) -> dict[str, str]:
    """``{flag: file}`` for every ``add_argument`` call of the features and of the general arguments."""
    found: dict[str, str] = {}
    for place in map(checkout.joinpath, _PLACES):
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place] if place.is_file() else []:
            for flag in _flags(ast.parse(file.read_bytes())):
                found.setdefault(flag, str(file.relative_to(checkout)))
    return found


def _flags(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            texts = (argument.value for argument in node.args if isinstance(argument, ast.Constant))
            yield from (text for text in texts if isinstance(text, str) and text.startswith("--"))


if __name__ == "__main__":
    for name, path in registered_flags(Path(sys.argv[1])).items():
        print(f"{name}  {path}")
