"""Read the names that a Python file binds from its text: definitions, imports and assignments of a module and its classes.

Nothing is ever imported. A file is found by asking the import system's finders level by level, which (other than
``importlib.util.find_spec``) does not import the parent packages. Tables are cached by path, size and modification time.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Final

from mindspeed.process.gc_pause import collector_paused


@dataclass(frozen=True, slots=True)
class Binding:
    """Describe a statement that binds a name.

    ``kind`` is function, class, import, module or assignment. ``source`` is the module that an import reads and
    ``name`` the name there; of an assignment of another name, ``name`` is that dotted name. ``branch`` says that the
    statement runs conditionally.
    """

    kind: str
    line: int
    branch: bool = False
    source: str = ""
    name: str = ""
    scope: Scope | None = None


@dataclass(slots=True)
class Scope:
    """Names bound in a module or class body, in order; ``stars`` are modules of star imports.

    ``bases`` of a class are dotted names, ``""`` for an expression.
    """

    bindings: dict[str, list[Binding]] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)
    bases: tuple[str, ...] = ()

    def bind(self, name: str, binding: Binding) -> None:
        self.bindings.setdefault(name, []).append(binding)

    def last(self, name: str) -> Binding | None:
        """The binding that counts; of a kind ``branches`` when it depends on the run which one that is."""
        found = self.bindings.get(name)
        if found is None:
            return None
        if len(found) > 1 and found[-1].branch:
            return Binding("branches", found[0].line)
        return found[-1]


@dataclass(frozen=True, slots=True)
class Module:
    """A module found on disk: its source file (None for compiled code) and where its submodules are looked up."""

    name: str
    file: str | None
    portions: tuple[str, ...] | None

    @property
    def package(self) -> str:
        """Return the package that a relative import of one dot starts from."""
        return self.name if self.portions is not None else self.name.rpartition(".")[0]


_found: dict[tuple[str, tuple[str, ...]], Module] = {}


def find_module(name: str) -> Module | None:
    """The module that ``import name`` would run, or None. Imports nothing; what was found once is not looked for again."""
    key = (name, tuple(sys.path))
    module = _found.get(key) or _look_for(name)
    if module is not None:
        _found[key] = module
    return module


def _look_for(name: str) -> Module | None:
    parent, _, part = name.rpartition(".")
    package = find_module(parent) if parent else None
    if parent and (package is None or package.portions is None):
        return None
    above = package.portions if package is not None else None
    spec = _ask_finders(name, above)
    if spec is not None:
        file = spec.origin if spec.has_location else None
        return Module(name, file if file is not None and file.endswith(".py") else None, _portions(spec))
    # the finders know a namespace package inside a package only once that is imported
    portions = tuple(path for path in (os.path.join(portion, part) for portion in above or ()) if os.path.isdir(path))
    return Module(name, None, portions) if portions else None


def loaded_module(name: str) -> Module | None:
    """The source of a module that is imported, wherever it came from (``__main__`` too), or what `find_module` finds."""
    entries = vars(sys.modules[name]) if name in sys.modules else {}
    file = entries.get("__file__")
    if not isinstance(file, str) or not file.endswith(".py"):
        return find_module(name)
    return Module(name, file, tuple(entries["__path__"]) if "__path__" in entries else None)


def _ask_finders(name: str, portions: tuple[str, ...] | None) -> ModuleSpec | None:
    path = list(portions) if portions is not None else None
    for finder in list(sys.meta_path):
        if getattr(finder, "patches_modules", False):  # our own, which only adds to what the others find
            continue
        find_spec = getattr(finder, "find_spec", None)
        with suppress(ImportError, KeyError):
            spec: ModuleSpec | None = find_spec(name, path, None) if find_spec else None
            if spec is not None:
                return spec
    return None


def _portions(spec: ModuleSpec) -> tuple[str, ...] | None:
    locations = spec.submodule_search_locations
    if locations is None:
        return None
    # a namespace package recomputes its path from its parent, which need not be imported
    return tuple(getattr(locations, "_path", locations))


_tables: dict[str, tuple[tuple[int, int], Scope]] = {}


def read_scope(module: Module | None) -> Scope | None:
    """The names that a module binds; None without Python source. Raises SyntaxError for a damaged file."""
    if module is None:
        return None
    if module.file is None:
        return Scope() if module.portions is not None else None
    key = state_of(module.file)
    _consult(module.file)
    known = _tables.get(module.file)
    if known is None or known[0] != key:
        with collector_paused():
            known = _tables[module.file] = (key, _Reader(module.package).read(parse(module.file).body))
    return known[1]


def read_text(module: Module) -> bytes:
    """The source of a module, empty where there is none."""
    if module.file is None:
        return b""
    _consult(module.file)
    return Path(module.file).read_bytes()


def state_of(file: str) -> tuple[int, int]:
    """Size and modification time, by which it is known whether a file has changed. Raises OSError when it is gone."""
    state = os.stat(file)
    return state.st_size, state.st_mtime_ns


_consulted: Final[ContextVar[set[str] | None]] = ContextVar("_consulted", default=None)
_trees: Final[ContextVar[dict[str, ast.Module] | None]] = ContextVar("_trees", default=None)
"""Both are of a thread: the matrix plans in several at once."""


@contextmanager
def files_consulted() -> Iterator[set[str]]:
    """The source files that are looked into within the block, by this thread."""
    files = set[str]()
    token = _consulted.set(files)
    try:
        yield files
    finally:
        _consulted.reset(token)


def _consult(file: str) -> None:
    if (files := _consulted.get()) is not None:
        files.add(file)


def parse(file: str) -> ast.Module:
    """The syntax tree of a file. Raises SyntaxError for a damaged one."""
    trees = _trees.get()
    if trees is not None and file in trees:
        return trees[file]
    with collector_paused():  # a syntax tree is many objects and no cycles
        tree = ast.parse(Path(file).read_bytes(), file)
    if trees is not None:
        trees[file] = tree
    return tree


@contextmanager
def trees_kept() -> Iterator[None]:
    """Parse no file twice within the block. The trees are dropped afterwards: they are large, and few need them."""
    outer = _trees.get()
    token = _trees.set({} if outer is None else outer)
    try:
        yield
    finally:
        _trees.reset(token)


@contextmanager
def only_tree(root: Path, package: str) -> Iterator[None]:
    """Look for ``package`` in the folder ``root`` alone, and for everything else there first, within the block."""
    folder = root / package
    init = folder / "__init__.py"
    sys.path.insert(0, str(root))
    try:
        _found[(package, tuple(sys.path))] = Module(package, str(init) if init.is_file() else None, (str(folder),))
        yield
    finally:
        sys.path.remove(str(root))


_COMPOUND: Final = (ast.If, ast.Try, ast.With, ast.For, ast.While)


class _Reader:
    """Collects the bindings of one body; imports are made absolute against ``package``."""

    def __init__(self, package: str) -> None:
        self.package = package
        self.scope = Scope()

    def read(self, body: Iterable[ast.stmt], branch: bool = False) -> Scope:
        for statement in body:
            self._statement(statement, branch)
        return self.scope

    def _statement(self, node: ast.stmt, branch: bool) -> None:
        bind = self.scope.bind
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            bind(node.name, Binding("function", node.lineno, branch))
        elif isinstance(node, ast.ClassDef):
            scope = _Reader(self.package).read(node.body)
            scope.bases = tuple(map(dotted, node.bases))
            bind(node.name, Binding("class", node.lineno, branch, scope=scope))
        elif isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.asname or alias.name.partition(".")[0]
                bind(name, Binding("module", node.lineno, branch, source=alias.name if alias.asname else name))
        elif isinstance(node, ast.ImportFrom):
            self._import_from(node, branch)
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            if node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                alias_of = dotted(node.value) if not isinstance(node, ast.AugAssign) else ""
                for name in _names(targets):
                    bind(name, Binding("assignment", node.lineno, branch, name=alias_of))
        elif isinstance(node, _COMPOUND):
            self._compound(node, branch)

    def _compound(self, node: ast.If | ast.Try | ast.With | ast.For | ast.While, branch: bool) -> None:
        if isinstance(node, ast.If) and dotted(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            self.read(node.orelse, branch)
            return
        if isinstance(node, ast.With | ast.For):
            targets = [node.target] if isinstance(node, ast.For) else [i.optional_vars for i in node.items if i.optional_vars]
            for name in _names(targets):
                self.scope.bind(name, Binding("assignment", node.lineno, branch))
        always = isinstance(node, ast.With)
        for body in (node.body, getattr(node, "orelse", []), getattr(node, "finalbody", [])):
            self.read(body, branch or not always)
        for handler in getattr(node, "handlers", []):
            self.read(handler.body, True)

    def _import_from(self, node: ast.ImportFrom, branch: bool) -> None:
        source = node.module or ""
        if node.level:
            parts = self.package.split(".")
            base = ".".join(parts[: len(parts) - node.level + 1])
            source = f"{base}.{source}" if source else base
        for alias in node.names:
            if alias.name == "*":
                self.scope.stars.append(source)
            else:
                binding = Binding("import", node.lineno, branch, source=source, name=alias.name)
                self.scope.bind(alias.asname or alias.name, binding)


def dotted(node: ast.expr) -> str:
    """``a.b.c`` of a name or attribute expression, ``""`` of any other."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def _names(targets: Iterable[ast.expr]) -> Iterator[str]:
    for target in targets:
        if isinstance(target, ast.Name):
            yield target.id
        elif isinstance(target, ast.Tuple | ast.List):
            yield from _names(target.elts)
        elif isinstance(target, ast.Starred):
            yield from _names([target.value])
