"""The sources that a case can reach: its key changes when the code of one does, and no other. Light.

Comments, docstrings, sentences, fixes and notes are no code: they change texts of a plan, and no number. A refusal is a text,
so its key counts these too. An operator's module stands for its C++ source as well.
"""

from __future__ import annotations

import ast
import hashlib
import platform
import re
from collections.abc import Iterable, Iterator
from functools import cached_property, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import CodeType
from typing import Any, Final, NamedTuple

import yaml

import mindspeed
from mindspeed.engine.inspection.megatron_copies import megatron_version
from mindspeed.engine.inspection.source import Module, find_module, read_text
from mindspeed.engine.inspection.source_cache import source_cache_of
from mindspeed.ops.variants import SOURCES, source_digest
from mindspeed.plugins.discovery import Catalog

_JUDGES: Final = (
    "mindspeed.workbench.verification.training",
    "mindspeed.workbench.verification.harness",
    "mindspeed.workbench.verification.matrix.judge",
)
"""The modules that run a case and compare: what they import, every case can reach."""
_ENTRANCES: Final = re.compile(r"mindspeed\.(compat|megatron_adaptor|megatron_lm|workbench\.conformance)\b")
"""Packages that serve scripts and authors of features: the code of a case names some, and no worker imports one."""
_PACKAGES: Final = ("torch", "numpy")
_JSON: Final = ".json"
_YAML: Final = ".yaml"
"""Files that have the name of a module, and that it reads."""
_OF_CASES: Final = "mindspeed/workbench/verification/matrix/cases.yaml"
"""A table of which each case knows its own rows."""
_OPERATORS: Final = Path(mindspeed.__file__).parent / "ops"
_SENTENCE: Final = re.compile(r"[A-Za-z]{2,},?(?: [a-z]{2,},?){2,}")
"""Three words in a row: no code decides anything by such a text, which a test holds."""
_TEXTS: Final = {"fix", "note", "reason", "message", "description"}
"""Keywords and keys of tables whose value is a text for people, however short."""


class _Code(NamedTuple):
    """Keep of a module the digests of its code and tables without and with sentences, and names that may be modules."""

    digest: str
    with_sentences: str
    names: list[str]


class Sources:
    """The modules of mindspeed and of the distributions of a catalog's features, and what each of them names."""

    def __init__(self, catalog: Catalog) -> None:
        self._modules = {name: row.reference.partition(":")[0] for name, row in catalog.usable.items()}
        self._kept: dict[str, set[str]] = {}

    def key(self, features: Iterable[str], *more: str, sentences: bool = False) -> str:
        """A digest of ``more``, the installed versions, and every source that a case with these features can reach."""
        digest = hashlib.blake2b(repr((self._versions, more)).encode(), digest_size=16)
        for name in sorted(self._of_judges.union(*map(self._by_feature, features))):
            code = self._code[name]
            digest.update(bytes.fromhex(code.with_sentences if sentences else code.digest))
        return digest.hexdigest()

    @cached_property
    def _versions(self) -> tuple[str | None, ...]:
        return (platform.python_version(), megatron_version(), *map(_installed, _PACKAGES))

    @cached_property
    def _files(self) -> dict[str, Path]:
        """Every module by name; those of third parties lie beside the modules of their features."""
        roots = {"mindspeed": Path(mindspeed.__file__).parent}
        for module in self._modules.values():
            top = module.partition(".")[0]
            if top not in roots and (found := find_module(top)) is not None and found.file is not None:
                file = Path(found.file)
                roots[top] = file.parent if file.name == "__init__.py" else file
        return {name: file for top, root in roots.items() for name, file in _modules_of(top, root)}

    @cached_property
    def _code(self) -> dict[str, _Code]:
        all_tops = "|".join(sorted({name.partition(".")[0] for name in self._files}))
        cache = source_cache_of(Path(mindspeed.__file__).parent)
        cache.revalidate()
        found = {}
        for name, file in self._files.items():
            tops = "mindspeed" if name.startswith("mindspeed.") else all_tops  # it names no third party
            found[name] = _Code(*cache.get(f"compiled code of {file} among {tops}", partial(_read, file, tops)))
        cache.save()
        return found

    @cached_property
    def _named(self) -> dict[str, set[str]]:
        """The modules that each module imports, anywhere, or has in a text such as ``"mindspeed.x.y:function"``."""
        return {
            name: {module for word in code.names if (module := self._module_of(word)) and not _ENTRANCES.match(module)} - {name}
            for name, code in self._code.items()
        }

    def _module_of(self, name: str) -> str:
        """The module of a dotted name, which may go on with names inside the module; '' for none of these."""
        while name and name not in self._files:
            name = name.rpartition(".")[0]
        return name

    @cached_property
    def _of_judges(self) -> set[str]:
        return self._reached(_JUDGES)

    def _by_feature(self, name: str) -> set[str]:
        if name not in self._kept:
            self._kept[name] = self._reached(self._of_feature(name))
        return self._kept[name]

    def _of_feature(self, name: str) -> list[str]:
        """The modules of a feature's package; of one that is a module, that module."""
        module = self._modules.get(name, "")
        package = module.rpartition(".")[0]
        return [found for found in self._files if found == module or (package and found.startswith(f"{package}."))]

    def _reached(self, roots: Iterable[str]) -> set[str]:
        found: set[str] = set()
        todo = [root for root in roots if root in self._files]
        while todo:
            name = todo.pop()
            if name not in found:
                found.add(name)
                todo += self._named[name]
        return found


def code_of(text: str, sentences: bool = False) -> str:
    """Return what a Python source does, whatever its layout, comments and docstrings are; maybe without sentences."""
    return "\n".join(_of_code(_compiled(text if sentences else _WithoutSentences().visit(ast.parse(text)))))


def _compiled(source: str | ast.Module) -> CodeType:
    """Compile a source without docstrings. Assert statements go as well; this project has none."""
    return compile(source, "", "exec", dont_inherit=True, optimize=2)


class _WithoutSentences(ast.NodeTransformer):
    """Empty every sentence, the words between the values of one, and the texts of `_TEXTS`."""

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        if isinstance(node.value, str) and _SENTENCE.search(node.value):
            node.value = ""
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        words = [word for part in node.values if isinstance(part, ast.Constant) for word in str(part.value).split()]
        if _SENTENCE.search(" ".join(words)):
            node.values = [part for part in node.values if not isinstance(part, ast.Constant)]
        return self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        return _WithoutTexts().visit(node) if node.arg in _TEXTS else self.generic_visit(node)


class _WithoutTexts(ast.NodeTransformer):
    """Empty every text, and keep the values in it."""

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        node.value = "" if isinstance(node.value, str) else node.value
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        node.values = [part for part in node.values if not isinstance(part, ast.Constant)]
        return self.generic_visit(node)


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


def _of_code(code: CodeType) -> Iterator[str]:
    for part in _nested(code):
        handlers: bytes = getattr(part, "co_exceptiontable", b"")  # from Python 3.11 on
        yield f"{part.co_name} {part.co_code.hex()} {handlers.hex()} {part.co_flags} {part.co_argcount}"
        yield f"{part.co_kwonlyargcount} {part.co_names} {part.co_varnames} {part.co_freevars} {part.co_cellvars}"
        yield from (repr(_ordered(constant)) for constant in part.co_consts if not isinstance(constant, CodeType))


def _ordered(constant: Any) -> Any:
    """A constant with its sets in one order."""
    if isinstance(constant, tuple):
        return [_ordered(inner) for inner in constant]
    return sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant


def _without_sentences(value: Any) -> Any:
    """The values of a table, without sentences and texts."""
    if isinstance(value, dict):
        return {key: _without_sentences(inner) for key, inner in value.items() if key not in _TEXTS}
    if isinstance(value, list):
        return [_without_sentences(inner) for inner in value]
    return "" if isinstance(value, str) and _SENTENCE.search(value) else value


def _named_in(code: CodeType, dotted: re.Pattern[str]) -> Iterator[str]:
    """The dotted names that code imports, each also with the names from it, and those in its texts."""
    for part in _nested(code):
        texts = list(_texts(part.co_consts))
        yield from dotted.findall("\n".join(texts))
        for module in filter(dotted.fullmatch, part.co_names):
            yield module
            yield from (f"{module}.{name}" for name in texts if name.isidentifier())


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, tuple | frozenset):
        for inner in value:
            yield from _texts(inner)


def _read(file: Path, tops: str) -> _Code:
    dotted = re.compile(rf"\b(?:{tops})(?:\.\w+)*")
    source = read_text(Module(file.stem, str(file), None)).decode()
    try:
        compiled = _compiled(source)
        names, text, whole = set(_named_in(compiled, dotted)), code_of(source), "\n".join(_of_code(compiled))
    except (SyntaxError, ValueError):  # a file that cannot be imported, as some packages have
        names, text, whole = set[str](), source, source
    for table in (file.with_suffix(suffix) for suffix in (_JSON, _YAML)):
        if table.exists() and not table.as_posix().endswith(_OF_CASES):
            rows = read_text(Module(table.stem, str(table), None)).decode()
            whole += rows
            text += rows if table.suffix == _JSON else repr(_without_sentences(yaml.safe_load(rows)))
    kernel = SOURCES / "cpu" / f"{file.stem}.cpp"
    if file.parent == _OPERATORS and kernel.exists():
        text, whole = (f"{part}\n{source_digest(kernel)}" for part in (text, whole))
    return _Code(_digest(text), _digest(whole), sorted(names))


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _modules_of(top: str, root: Path) -> Iterable[tuple[str, Path]]:
    if root.is_file():
        return [(top, root)]
    return ((_name(top, file.relative_to(root)), file) for file in sorted(root.rglob("*.py")))


def _name(top: str, file: Path) -> str:
    return ".".join((top, *file.with_suffix("").parts)).removesuffix(".__init__")


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
