"""The condition of a constraint as text, read from the source of its function."""

from __future__ import annotations

import ast
import copy
import inspect
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any


def condition(predicate: Callable[..., Any]) -> str:
    """``lambda args, world: args.size > 1`` -> ``args.size > 1``; a function that is more than one expression by its name.

    Calls of such functions of the same file are replaced by what they return.
    """
    function = inspect.unwrap(predicate)
    known = _functions(inspect.getsourcefile(function) or "")
    starting = [node for node in known if node.lineno == function.__code__.co_firstlineno]
    bodies = [body for node in starting if (body := _expression(node)) and _same(body, node, function)]
    texts = {ast.unparse(_Inlined(known).visit(copy.deepcopy(body))) for body in bodies}
    return texts.pop() if len(texts) == 1 else str(function.__name__)


class _Inlined(ast.NodeTransformer):
    """Replaces ``_full(args, world)`` by the expression that ``_full`` returns, where the parameters have the same names."""

    def __init__(self, known: Iterable[ast.Lambda | ast.FunctionDef]) -> None:
        self.known = {node.name: node for node in known if isinstance(node, ast.FunctionDef)}

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        called = self.known.get(ast.unparse(node.func))
        names = [ast.unparse(argument) for argument in node.args]
        if called and [argument.arg for argument in called.args.args] == names and (body := _expression(called)):
            return copy.deepcopy(body)
        return node


@lru_cache
def _functions(file: str) -> tuple[ast.Lambda | ast.FunctionDef, ...]:
    try:
        with open(file, encoding="utf-8") as source:
            tree = ast.parse(source.read())
    except (OSError, SyntaxError):
        return ()
    return tuple(node for node in ast.walk(tree) if isinstance(node, ast.Lambda | ast.FunctionDef))


def _expression(node: ast.Lambda | ast.FunctionDef) -> ast.expr | None:
    if isinstance(node, ast.Lambda):
        return node.body
    last = node.body[-1]
    return last.value if len(node.body) == 1 and isinstance(last, ast.Return) else None


def _same(body: ast.expr, node: ast.Lambda | ast.FunctionDef, function: Callable[..., Any]) -> bool:
    """Whether ``body`` compiles to the code of ``function``: several lambdas may begin on one line."""
    again = ast.Expression(ast.Lambda(node.args, body))
    compiled = compile(ast.fix_missing_locations(again), "again", "eval").co_consts[0]
    ours = function.__code__
    return (compiled.co_code, compiled.co_names) == (ours.co_code, ours.co_names)
