"""Reads the contract of a target from source text: nothing is imported, and every Python version reads the same."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any, Final

from mindspeed.engine.inspection.contracts import ABSENT, Contract, near_by_content, part_of
from mindspeed.engine.inspection.sites import Site, definitions, find_site, near_targets
from mindspeed.engine.inspection.source import dotted, find_module, parse, read_scope

_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_DESCRIPTORS: Final = ("staticmethod", "classmethod", "property")
_DATACLASS: Final = frozenset(("dataclass", "dataclasses.dataclass"))
_KINDS: Final = {ast.FunctionDef: "function", ast.AsyncFunctionDef: "function", ast.ClassDef: "class"}
_SAYS_NOTHING: Final = {
    # fields that name or annotate; what is left decides what the code does
    ast.FunctionDef: ("name", "args"),
    ast.AsyncFunctionDef: ("name", "args"),
    ast.ClassDef: ("name",),
    ast.arg: ("annotation",),
    ast.Constant: ("kind",),
}
_NEVER_SAYS: Final = ("ctx", "returns", "type_comment", "type_params")


def read_contract(target: str) -> Contract:
    """The contract of a target in the Megatron that is found on the path; of kind absent where there is none."""
    site = find_site(target)
    if site is None or site.kind == ABSENT:
        return Contract(ABSENT)
    contract = contract_at(site)
    return contract if site.name == target else replace(contract, site=site.name)


def contract_at(site: Site) -> Contract:
    """The contract of a site. What cannot be read (compiled code, a base in a package that is not here) has only a kind."""
    nodes = definition_nodes(site)
    return _contract(site, nodes) if nodes else Contract(site.kind)


def barrier_of(site: Site) -> str:
    """Give the reason why a class cannot be replaced or mixed into; empty when it can, and for anything else."""
    nodes = definition_nodes(site) if site.kind == "class" else []
    if not nodes:
        return ""
    definition = nodes[-1]
    if not _DATACLASS.isdisjoint(_decorators(definition)):
        return "the target is a dataclass"
    for node in ast.walk(definition):
        if isinstance(node, ast.Call) and (text := _names_class(node, site.qualname)):
            return f"the class refers to itself by {text} (line {node.lineno}), which would mean the new class"
    return ""


def _names_class(call: ast.Call, name: str) -> str:
    """The text of a call that hands ``self`` to a method of the class by the class's own name."""
    first = dotted(call.args[0]) if call.args else ""
    function = dotted(call.func)
    if function == "super" and first == name:
        return f"super({name}, ...)"
    if function.startswith(f"{name}.") and (first in ("self", "cls") or function.split(".")[1].startswith("__")):
        return f"{function}(...)"
    return ""


def successors(target: str, recorded: Contract) -> list[str]:
    """Find successors of a missing target: an equal body or signature in the same module, then similar names."""
    module, _, qualname = target.partition(":")
    scope = read_scope(find_module(module))
    owner, _, name = qualname.rpartition(".")
    candidates: dict[str, Contract] = {}
    if scope is not None and (not owner or scope.last(owner) is not None):
        binding = scope.last(owner) if owner else None
        below = binding.scope if binding is not None else scope
        names = [other for other in (below.bindings if below is not None else ()) if other != name]
        candidates = _read_all(f"{module}:{owner}." if owner else f"{module}:", names)
    elif scope is not None:  # the class has another name, and its member perhaps the old one
        classes = [other for other, bound in scope.bindings.items() if bound[-1].kind == "class"]
        for other in classes:
            candidates |= _read_all(f"{module}:{other}.", [name])
    alike = [name for name in near_targets(target) if ":" in name]  # a module alone replaces no target
    return (near_by_content(recorded, candidates) or alike)[:3]


def _read_all(prefix: str, names: Sequence[str]) -> dict[str, Contract]:
    sites = ((f"{prefix}{name}", find_site(f"{prefix}{name}")) for name in names)
    return {name: contract_at(site) for name, site in sites if site is not None and site.name == name}


def definition_nodes(site: Site) -> list[ast.stmt]:
    """The statements that bind a site; empty where they are not Megatron's, and so not part of its release."""
    module, bindings = definitions(site) or (None, ())
    if module is None or module.file is None or part_of(f"{module.name}:") is None:
        return []
    lines = {binding.line for binding in bindings}
    return [node for node in _statements(parse(module.file)) if node.lineno in lines and _binds(node, site)]


def _contract(site: Site, nodes: Sequence[ast.stmt]) -> Contract:
    signatures = [text for node in nodes if (text := _signature(node, site))]
    kind = site.kind
    if kind == "outside":  # a script beside the megatron folder
        kind = _KINDS.get(type(nodes[-1]), "assignment")
    if len(nodes) == 1 and kind in ("function", "method"):
        kind = next((name for name in _decorators(nodes[0]) if name in _DESCRIPTORS), kind)
    words: list[str] = []
    for node in nodes:
        _feed(node, words)
    body = hashlib.blake2b("\n".join(words).encode(), digest_size=8).hexdigest()
    return Contract(kind, " or ".join(dict.fromkeys(signatures)), body)


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Statements of a module, of its classes and of their branches, outermost first; not those inside functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child
        if isinstance(child, ast.stmt | ast.ExceptHandler) and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _statements(child)


def _binds(node: ast.stmt, site: Site) -> bool:
    """Return whether a statement on the right line is the one that binds, and not one around it."""
    if isinstance(node, _Definition):
        return node.name == site.qualname.rpartition(".")[2]
    return isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Import | ast.ImportFrom)


def _decorators(node: ast.stmt) -> list[str]:
    listed = node.decorator_list if isinstance(node, _Definition) else []
    return [dotted(decorator.func if isinstance(decorator, ast.Call) else decorator) for decorator in listed]


def _signature(node: ast.stmt, site: Site) -> str:
    """Parameters of a function, of a class those of its ``__init__``."""
    if isinstance(node, ast.ClassDef):
        constructors = definition_nodes(Site(site.module, f"{site.qualname}.__init__", "method"))
        return _signature(constructors[-1], site) if constructors else ""
    return signature_text(node.args) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else ""


def signature_text(arguments: ast.arguments) -> str:
    """Parameters as they are written, without annotations: ``(a, /, b=1, *rest, c, **more)``."""
    bare = deepcopy(arguments)
    for node in ast.walk(bare):
        if isinstance(node, ast.arg):
            node.annotation = None
    return f"({ast.unparse(bare)})"


def _feed(value: Any, words: list[str], member: bool = False) -> None:
    """Append node names, field names and constants of a syntax tree; ``ast.dump`` differs between Python versions.

    Empty fields and docstrings are left out. A definition inside a class counts with its name and parameters.
    """
    if isinstance(value, ast.AST):
        words.append(type(value).__name__)
        ignored = () if member and isinstance(value, _Definition) else _SAYS_NOTHING.get(type(value), ())
        for name, inner in ast.iter_fields(value):
            if name in ignored or name in _NEVER_SAYS or inner is None or inner == []:
                continue
            words.append(name)
            if name == "body" and isinstance(value, _Definition):
                inner = inner[1:] if ast.get_docstring(value, clean=False) is not None else inner
            elif isinstance(value, ast.JoinedStr):  # Python 3.12 puts empty texts between the parts
                inner = [part for part in inner if not (isinstance(part, ast.Constant) and part.value == "")]
            _feed(inner, words, member=True)
        words.append(")")
    elif isinstance(value, list):
        for item in value:
            _feed(item, words, member)
        words.append("]")
    else:
        words.append(repr(value))
