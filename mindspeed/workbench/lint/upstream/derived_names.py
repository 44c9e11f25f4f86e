"""Attributes that Megatron's validation and configurations derive from arguments, read from the source of a checkout."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

_SOURCES: Final = ("arguments.py", "argument_utils.py", "utils.py", "utils/*.py")
"""Files of ``megatron.training`` that derive attributes."""


@dataclass(frozen=True, slots=True)
class DerivedNames:
    """Hold for each derived attribute the names that decide it, and the one that it is a copy of, where it is one."""

    givers: Mapping[str, frozenset[str]]
    copies: Mapping[str, str]

    def sources(self, name: str, known: frozenset[str]) -> list[str]:
        """Return those of the ``known`` arguments that decide an attribute, directly or by other attributes."""
        found: list[str] = []
        seen, queue = {name}, [name]
        while queue:
            for giver in sorted(self.givers.get(queue.pop(0), frozenset()) - seen):
                seen.add(giver)
                (found if giver in known else queue).append(giver)
        return found


@lru_cache(maxsize=8)
def derived_names(checkout: Path) -> DerivedNames:
    """Read the names of a checkout. A file that cannot be read or parsed derives none."""
    givers: dict[str, set[str]] = {}
    copies: dict[str, set[str]] = {}
    folder = checkout / "megatron" / "training"
    for file in (file for pattern in _SOURCES for file in sorted(folder.glob(pattern))):
        try:
            tree = ast.parse(file.read_text(encoding="utf-8", errors="replace"))
        except (OSError, SyntaxError):
            continue
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef):
                for name, reads, copy in _Assignments().of(function.body, frozenset()):
                    givers.setdefault(name, set()).update(reads - {name})
                    copies.setdefault(name, set()).add(copy)
    only = {name: next(iter(found)) for name, found in copies.items() if len(found) == 1}
    return DerivedNames(
        {name: frozenset(reads) for name, reads in givers.items()}, {name: copy for name, copy in only.items() if copy}
    )


class _Assignments:
    """Find the attributes that a function sets; local names stand for the attributes that their values read."""

    def __init__(self) -> None:
        self._locals: dict[str, set[str]] = {}

    def of(self, body: list[ast.stmt], tests: frozenset[str]) -> Iterator[tuple[str, set[str], str]]:
        """Yield for each attribute its name, what its value and the conditions around it read, and what it is a copy of."""
        for node in body:
            if isinstance(node, (ast.Assign, ast.AugAssign)):
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                reads = {*self._reads(node.value), *tests}
                if isinstance(target, ast.Name):
                    self._locals.setdefault(target.id, set()).update(reads)
                elif name := _attribute(target):
                    yield name, reads, "" if tests else _attribute(node.value)
            inner = tests | self._reads(node.test) if isinstance(node, (ast.If, ast.While)) else tests
            for block in ("body", "orelse", "finalbody"):
                yield from self.of(getattr(node, block, []), inner)

    def _reads(self, value: ast.expr) -> set[str]:
        names = {name for node in ast.walk(value) if (name := _attribute(node))}
        local = (self._locals.get(node.id, set()) for node in ast.walk(value) if isinstance(node, ast.Name))
        return names.union(*local)


def _attribute(node: ast.AST) -> str:
    """Return the name of the attribute or key that an expression is; empty where it is neither."""
    match node:
        case ast.Attribute(ast.Name("args" | "self" | "config"), name):
            return name
        case ast.Subscript(ast.Name("kw_args"), ast.Constant(str(name))):
            return name
        case ast.Call(ast.Name("getattr"), [ast.Name("args"), ast.Constant(str(name)), *_]):
            return name
    return ""
