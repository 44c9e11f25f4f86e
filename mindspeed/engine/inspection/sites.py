"""Sites: where the last definition of a patch target is bound, found from source text alone.

Imports are followed inside megatron only, so that the many names of one object are one site. An assignment, or a name
bound in several branches, is a site of its own, never its value's. Targets in other packages are taken as written:
much of torch is compiled or made at import, so their names are looked up when the patch is applied.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pkgutil import iter_modules
from typing import Final

from mindspeed.engine.inspection.source import Binding, Module, Scope, find_module, loaded_module, read_scope, read_text
from mindspeed.problems import near_names

TREE: Final = "megatron"
"""The package inside which imports are followed."""

CHECKOUT: Final = frozenset(f"{TREE}.{name}" for name in ("training", "legacy", "post_training", "rl", "inference"))
"""Packages that a Megatron-LM checkout has beside megatron.core, and the megatron-core distribution has not."""

_MEMBERLESS: Final = ("object", "ABC", "abc.ABC", "Protocol", "typing.Protocol")
"""Bases that give a class no member of its own, though their source does not say so."""

OUTSIDE: Final = "outside"
"""Kind of a name outside Megatron."""

IMPORTED: Final = "import"
"""Kind of a module that is imported in a branch: where it is not installed, nothing has the name."""


@dataclass(frozen=True, slots=True)
class Site:
    """Locate the statement that binds a target.

    ``kind`` is function, class, method, assignment, branches (bound in several), import (of a module, in a branch), outside
    (in another package, taken as written) or absent (its package is not installed here, so nothing is known). ``line`` is 0
    when unknown.
    """

    module: str
    qualname: str
    kind: str
    file: str = ""
    line: int = 0

    @property
    def name(self) -> str:
        """``module:qualname``."""
        return f"{self.module}:{self.qualname}"


def find_site(target: str) -> Site | None:
    """The site of ``"module:qualname"``, or None when there is no such name. Imports nothing.

    A member that a class only inherits is a site on that class.
    """
    module, _, qualname = target.partition(":")
    if inside_tree(module) and (find_module(TREE) is None or awaits_checkout(module)):
        return Site(module, qualname, "absent")
    return _resolve(module, qualname.split("."), set())


def awaits_checkout(module: str) -> bool:
    """Return whether a module belongs to a package of `CHECKOUT` that is not on the path (yet)."""
    package = ".".join(module.split(".")[:2])
    return package in CHECKOUT and find_module(package) is None


def definitions(site: Site) -> tuple[Module, tuple[Binding, ...]] | None:
    """The module and the statements that bind a site, several where it depends on the run; None when they cannot be read.

    Of a member that is only inherited, those of the class that has it.
    """
    module = find_module(site.module)
    scope = read_scope(module)
    *owners, name = site.qualname.split(".")
    for owner in owners:
        binding = scope.last(owner) if scope is not None else None
        scope = binding.scope if binding is not None else None
    if module is None or scope is None:
        return None
    for body in _bodies(module, scope):
        if body is not None and name in body[1].bindings:
            bindings = body[1].bindings[name]
            return body[0], tuple(bindings) if bindings[-1].branch else (bindings[-1],)
    return None


def _bodies(module: Module, scope: Scope, seen: tuple[Scope, ...] = ()) -> Iterator[tuple[Module, Scope] | None]:
    """The body of a class and those of its bases, depth first, each in its module; None for a base that cannot be read."""
    yield module, scope
    for base in scope.bases:
        where = _class_named(module.name, base.split(".")) if base not in _MEMBERLESS else (module, scope)
        if where is None:
            yield None
        elif all(where[1] is not known for known in (scope, *seen)):
            yield from _bodies(*where, (scope, *seen))


def inside_tree(module: str) -> bool:
    """Return whether imports of this module are followed."""
    return module == TREE or module.startswith(f"{TREE}.")


def follows_to(target: str, site: str) -> bool:
    """Return whether the name ``target`` is an import, over any number of modules of any package, of what ``site`` binds."""
    seen = set()
    while target != site and target not in seen:
        seen.add(target)
        module, _, name = target.partition(":")
        found = loaded_module(module)
        scope = read_scope(found)
        if scope is None:
            return False
        binding = scope.last(name)
        if binding is not None and binding.kind == "import":
            target = f"{binding.source}:{binding.name}"
        elif binding is None and scope.stars:
            return any(follows_to(f"{star}:{name}", site) for star in scope.stars)
    return target == site


def may_import(module: str, name: str, key: str) -> bool:
    """Return whether the source of a loaded module may import ``name`` as ``key``: an inexpensive test before it is parsed."""
    found = loaded_module(module)
    text = read_text(found) if found is not None else b""
    if key == name and b"import *" in text:
        return True
    word = name.encode()
    lines = text.splitlines() if word in text else []
    return any(word in line and word in _WORD.findall(line) and _IMPORTING.fullmatch(line) for line in lines)


_WORD: Final = re.compile(rb"\w+")
_IMPORTING: Final = re.compile(rb".*\b(from|import)\b.*|[\s(]*\w+(\s+as\s+\w+)?(\s*,\s*\w+(\s+as\s+\w+)?)*[\s,)\\]*(#.*)?")
"""A line that may be of an import statement: it begins one, or goes on with nothing but names."""


def _outside(module: str, qualname: str) -> Site | None:
    if find_module(module.partition(".")[0]) is None:
        return Site(module, qualname, "absent")
    found = find_module(module)
    return Site(module, qualname, OUTSIDE, found.file or "") if found is not None else None


def _resolve(module: str, parts: list[str], seen: set[tuple[str, str]]) -> Site | None:
    """Follow ``parts`` from a module. ``seen`` stops circular imports."""
    if not inside_tree(module):
        return _outside(module, ".".join(parts))
    if (module, ".".join(parts)) in seen:
        return None
    seen.add((module, ".".join(parts)))
    found = find_module(module)
    if found is None:
        return _through_attribute(module, parts, seen)
    scope = read_scope(found)
    if scope is None:
        return Site(module, ".".join(parts), OUTSIDE)
    name, rest = parts[0], parts[1:]
    binding = scope.last(name)
    if binding is None:
        return _unbound(found, scope, parts, seen)
    if binding.kind == "import":
        return _imported(found, binding, parts, seen)
    if binding.kind == "module" and not rest:
        return Site(module, name, IMPORTED, found.file or "", binding.line) if binding.branch else None
    if binding.kind == "module":
        return _resolve(binding.source, rest, seen)
    if not rest:
        return Site(module, name, binding.kind, found.file or "", binding.line)
    if binding.kind == "assignment" and binding.name:
        return _resolve(module, [*binding.name.split("."), *rest], seen)
    if binding.kind == "class" and binding.scope is not None:
        return _member(found, [name], binding.scope, rest)
    # what an assignment or a branch leaves is known at run time only
    return None if binding.kind == "function" else Site(module, ".".join(parts), binding.kind, found.file or "", binding.line)


def _through_attribute(module: str, parts: list[str], seen: set[tuple[str, str]]) -> Site | None:
    """``megatron.core.mpu`` is no file: it is a name that ``megatron.core`` binds to a module."""
    parent, _, name = module.rpartition(".")
    scope = read_scope(find_module(parent)) if parent else None
    binding = scope.last(name) if scope is not None else None
    if binding is None or binding.source == module:  # a name that is imported from the very module that is missing
        return None
    return _resolve(parent, [name, *parts], seen)


def _unbound(module: Module, scope: Scope, parts: list[str], seen: set[tuple[str, str]]) -> Site | None:
    if len(parts) > 1 and find_module(f"{module.name}.{parts[0]}") is not None:
        return _resolve(f"{module.name}.{parts[0]}", parts[1:], seen)
    for star in reversed(scope.stars):
        site = _resolve(star, parts, seen) if inside_tree(star) else None
        if site is not None:
            return site
    return None


def _imported(module: Module, binding: Binding, parts: list[str], seen: set[tuple[str, str]]) -> Site | None:
    if not inside_tree(binding.source) and len(parts) == 1:
        return Site(module.name, parts[0], "assignment", module.file or "", binding.line)
    submodule = f"{binding.source}.{binding.name}"
    if len(parts) > 1 and find_module(submodule) is not None:
        return _resolve(submodule, parts[1:], seen)
    return _resolve(binding.source, [binding.name, *parts[1:]], seen)


def _member(module: Module, owner: list[str], scope: Scope, rest: list[str]) -> Site | None:
    """The site of ``rest`` below the class ``owner`` with the body ``scope``; a base that cannot be read may have any name."""
    path, file, name = ".".join([*owner, *rest]), module.file or "", rest[0]
    bodies = list(_bodies(module, scope))
    found = next((binding for body in bodies if body is not None and (binding := body[1].last(name)) is not None), None)
    if found is None:
        return Site(module.name, path, "method", file) if None in bodies or name in vars(object) else None
    if len(rest) > 1:
        return _member(module, [*owner, name], found.scope, rest[1:]) if found.scope is not None else None
    return Site(module.name, path, "method" if found.kind == "function" else found.kind, file, found.line)


def _class_named(source: str, path: list[str], hops: int = 20) -> tuple[Module, Scope] | None:
    """The class that a dotted name means in a module, followed over imports of any package."""
    head, tail = path[0], path[1:]
    if hops == 0:
        return None
    if tail and find_module(f"{source}.{head}") is not None:
        return _class_named(f"{source}.{head}", tail, hops - 1)
    found = find_module(source)
    scope = read_scope(found)
    if found is None or scope is None:
        return None
    binding = scope.last(head)
    if binding is None:
        return next((hit for star in scope.stars if (hit := _class_named(star, path, hops - 1)) is not None), None)
    if binding.scope is not None and not tail:
        return found, binding.scope
    if binding.kind == "module" and tail:
        return _class_named(binding.source, tail, hops - 1)
    if binding.kind == "import":
        return _class_named(binding.source, [binding.name, *tail], hops - 1)
    return None


def near_targets(target: str) -> list[str]:
    """Up to three existing targets that look like a missing one: in its module or class, or the same name elsewhere."""
    module, _, qualname = target.partition(":")
    found = find_module(module)
    if found is None:
        near = near_names(module, _sibling_modules(module), cutoff=0.6)
        moved = _defined_elsewhere(module, qualname)
        return (moved or [f"{name}:{qualname}" for name in near if find_site(f"{name}:{qualname}")] or near)[:3]
    owner, _, name = qualname.rpartition(".")
    prefix = f"{module}:{owner}." if owner else f"{module}:"
    near = near_names(name, _names_at(found, owner) - {name}, cutoff=0.6)
    near = [prefix + other for other in near] or _defined_elsewhere(module, qualname)
    return [other for other in near if other != target][:3]


def _names_at(module: Module, owner: str) -> set[str]:
    """Names in a module, or in the class ``owner`` and its readable bases."""
    if not owner:
        scope = read_scope(module)
        return set(scope.bindings) if scope is not None else set()
    where = _class_named(module.name, owner.split("."))
    bodies = _bodies(*where) if where is not None else ()
    return {name for body in bodies if body is not None for name in body[1].bindings}


def _sibling_modules(module: str) -> list[str]:
    parent = module
    while "." in parent:
        parent = parent.rpartition(".")[0]
        found = find_module(parent)
        if found is not None:
            return [f"{parent}.{entry.name}" for entry in iter_modules(found.portions or ())]
    return []


def _defined_elsewhere(module: str, qualname: str) -> list[str]:
    """Modules of the tree that define the first name of ``qualname`` at their top."""
    if not inside_tree(module):
        return []
    definition = re.compile(rf"^(?:def|class) {re.escape(qualname.partition('.')[0])}\b", re.MULTILINE)
    tree = find_module(TREE)
    return [
        f"{name}:{qualname}"
        for portion in (tree.portions if tree is not None else None) or ()
        for file in sorted(Path(portion).rglob("*.py"))
        if definition.search(file.read_text(encoding="utf-8", errors="replace"))
        for name in [_module_name(Path(portion), file)]
    ]


def _module_name(portion: Path, file: Path) -> str:
    parts = (TREE, *file.relative_to(portion).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
