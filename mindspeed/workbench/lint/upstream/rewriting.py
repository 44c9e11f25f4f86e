"""Rewrite validating functions so that each statement that fails is collected and the next one still runs. Child only."""

from __future__ import annotations

import ast
import io
import sys
from ast import parse
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from traceback import walk_tb
from types import CodeType, FrameType, SimpleNamespace
from typing import Any, Final

from mindspeed.workbench.lint.upstream.stand_ins import ImportStandIn, UndecidedError

_VALIDATING: Final = ("validate", "_validate")
_COLLECTING: Final = frozenset({"core_transformer_config_from_args", "__post_init__"})
_UNGUARDED: Final = (ast.Break, ast.Continue, ast.Pass, ast.Global, ast.Nonlocal, ast.FunctionDef, ast.ClassDef)


@dataclass(slots=True)
class RuleSite:
    """Hold an assertion or a raise of a validating function, the source of its condition, and what happened there."""

    file: str
    line: int
    text: str
    reads: tuple[tuple[str, str], ...]
    is_raise: bool = False


Wanted = tuple[str, str, str]
"""An attribute or ``$VARIABLE``, how its value relates to another one (``at most``; empty for equal), and that value.

A value is ``on`` or ``off`` where the attribute is to be true or false.
"""


@dataclass(slots=True)
class _Failure:
    """Describe how a site failed: what it says, the values that it read, and those that would satisfy it.

    ``at_start`` is true for code that gets the validated arguments.
    """

    message: str
    values: dict[str, Any]
    wanted: list[Wanted]
    at_start: bool = False


@dataclass(slots=True)
class _Statement:
    """Hold a guarded statement: the numbers of the sites in it, its own where it is one, and the attributes that it sets."""

    sites: range
    sets: frozenset[str]
    own: int | None = None
    test: ast.expr | None = None


class Rules:
    """Collect the sites of the modules that it compiles, and what becomes of them in one command."""

    def __init__(self) -> None:
        self.sites: list[RuleSite] = []
        self.statements: list[_Statement] = []
        self.reached: set[int] = set()
        self.failures: dict[int, _Failure] = {}
        self.undecided: dict[int, str] = {}
        self.unknown: set[str] = set()
        self.raising: dict[tuple[str, int], ast.Raise | ast.Assert] = {}
        self._locals: dict[str, ast.expr] = {}

    def compiled(self, text: str, file: str) -> CodeType:
        """Compile the source of a module with its validating functions guarded."""
        tree = parse(text)
        for node in _statements(tree):
            if isinstance(node, (ast.Raise, ast.Assert)):
                self.raising |= {(file, line): node for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
            elif isinstance(node, ast.FunctionDef) and (node.name in _COLLECTING or node.name.startswith(_VALIDATING)):
                first, self._locals = len(self.sites), {}
                body = self._block(node.body, file, ())
                number = self._number(_Statement(range(first, len(self.sites)), frozenset()))
                node.body = [_call("__entered__", number, node.body[0]), *body]
        code: CodeType = compile(tree, file, "exec", dont_inherit=True)
        return code

    def names(self) -> dict[str, Any]:
        """Return the names that the rewritten code calls."""
        return {"__entered__": self.entered, "__failed__": self.failed, "__Stop__": (Exception, SystemExit)}

    def _block(self, body: Sequence[ast.stmt], file: str, tests: tuple[ast.expr, ...]) -> list[ast.stmt]:
        return [self._guarded(statement, file, tests) for statement in body]

    def _guarded(self, node: ast.stmt, file: str, tests: tuple[ast.expr, ...]) -> ast.stmt:
        if isinstance(node, _UNGUARDED):
            return node
        first, own, test, sets = len(self.sites), None, None, frozenset(_attributes_set(node))
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            self._locals[node.targets[0].id] = node.value
        elif isinstance(node, (ast.Assert, ast.Raise)):
            test = node.test if isinstance(node, ast.Assert) else None
            reads = dict.fromkeys(
                read for one in (*([test] if test else []), *reversed(tests)) for read in _reads(one, self._locals)
            )
            text = ast.unparse(test) if test is not None else ""
            if test is None and tests:
                test = _negated(tests[-1])
                text = f"not ({ast.unparse(test.operand)})" if isinstance(test, ast.UnaryOp) else ast.unparse(test)
            own = self._new_site(RuleSite(file, node.lineno, text, tuple(reads), isinstance(node, ast.Raise)))
            if isinstance(node, ast.Assert) and tests and _is_presence(_negated(tests[-1])):  # the value makes the rule idle
                test = ast.BoolOp(ast.Or(), [_negated(tests[-1]), node.test])
        elif isinstance(node, ast.Try):
            for handler in node.handlers:
                handler.body = self._block(handler.body, file, tests)
            node.orelse = self._block(node.orelse, file, tests)
            node.finalbody = self._block(node.finalbody, file, tests)
        else:
            inner = (*tests, node.test) if isinstance(node, (ast.If, ast.While)) else tests
            if body := getattr(node, "body", None):
                node.body = self._block(body, file, inner)  # type: ignore[attr-defined]
            if orelse := getattr(node, "orelse", None):
                others = (*tests, _negated(node.test)) if isinstance(node, ast.If) else inner
                node.orelse = self._block(orelse, file, others)  # type: ignore[attr-defined]
        number = self._number(_Statement(range(first, len(self.sites)), sets, own, test))
        stop, collect = ast.Name("__Stop__", ast.Load()), _call("__failed__", number, node, "__error__")
        handler = ast.fix_missing_locations(ast.copy_location(ast.ExceptHandler(stop, "__error__", [collect]), node))
        return ast.copy_location(ast.Try([node], [handler], [], []), node)

    def _number(self, statement: _Statement) -> int:
        self.statements.append(statement)
        return len(self.statements) - 1

    def _new_site(self, site: RuleSite) -> int:
        self.sites.append(site)
        return len(self.sites) - 1

    def forget(self) -> None:
        """Begin another command."""
        for states in (self.reached, self.failures, self.undecided, self.unknown):
            states.clear()

    def states(self) -> dict[str, Any]:
        """Return what became of the sites in this command, by their numbers, failures in their order."""
        held = self.reached - self.failures.keys() - self.undecided.keys()
        failed = [{"site": site, **asdict(failure)} for site, failure in self.failures.items()]
        return {"failed": failed, "undecided": list(self.undecided.items()), "held": sorted(held)}

    def entered(self, number: int) -> None:
        """A function is called: its sites hold until one fails."""
        self.reached.update(self.statements[number].sites)

    def failed(self, number: int, error: BaseException) -> None:
        """A statement failed: by its rule, by one of a function that it calls, or because something is not known."""
        statement, frame = self.statements[number], sys._getframe(1)
        own, at = statement.own, place(error)
        if not isinstance(error, UndecidedError):
            if own is not None and (isinstance(error, AssertionError) or self.sites[own].is_raise):
                self._found(own, error, frame.f_locals, frame.f_globals, statement.test)
                return
            if own is None and (at in self.raising or isinstance(error, SystemExit)):
                self._found_in_function(at, error)
                return
        self.undecided |= {site: f"{type(error).__name__}: {error}" for site in statement.sites if site not in self.failures}
        self.unknown |= statement.sets

    def _found_in_function(self, at: tuple[str, int], error: BaseException) -> None:
        """A function that is called refuses values: those of its assertion, with the names of arguments that it was given."""
        node, frame = self.raising.get(at), _last_frame(error)
        if isinstance(node, ast.Assert) and frame is not None:
            test: ast.expr = _Named(frame.f_locals).visit(deepcopy(node.test))
            reads = tuple(read for read in _reads(test, {}) if read[0] in frame.f_locals)
            if reads:
                site = self._new_site(RuleSite(*at, ast.unparse(test), reads))
                self._found(site, error, frame.f_locals, frame.f_globals, test)
                return
        self._found(self._new_site(RuleSite(*at, "", ())), error, {}, {}, None)

    def refused(
        self, at: tuple[str, int], text: str, message: str, values: Mapping[str, Any], wanted: Sequence[Wanted]
    ) -> None:
        """Add a failure of code that validated arguments are given to, where ``values`` are the arguments that it is given."""
        shown = {dest: " ".join(map(str, one)) if isinstance(one, list) else _plain(one) for dest, one in values.items()}
        self.failures[self._new_site(RuleSite(*at, text, ()))] = _Failure(message, shown, list(wanted), at_start=True)

    def _found(
        self, site: int, error: BaseException, names: dict[str, Any], scope: dict[str, Any], test: ast.expr | None
    ) -> None:
        message = _last_line() if isinstance(error, SystemExit) else " ".join(str(error).split())
        known = {read: getattr(names[read[0]], read[1], None) for read in self.sites[site].reads if read[0] in names}
        values = {attribute: _plain(value) for (_, attribute), value in known.items() if not isinstance(value, SimpleNamespace)}
        self.undecided.pop(site, None)
        self.failures.pop(site, None)
        self.failures[site] = _Failure(message, values, _wanted(test, names, scope) if test is not None else [])


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements below a node, each before those in it."""
    for name in ("body", "handlers", "orelse", "finalbody", "cases"):
        for child in getattr(node, name, ()):
            yield child
            yield from _statements(child)


def place(error: BaseException) -> tuple[str, int]:
    """Return file and line of an error."""
    trace = error.__traceback__
    while (
        trace is not None
        and trace.tb_next is not None
        and not trace.tb_next.tb_frame.f_code.co_filename.endswith("argparse.py")
    ):
        trace = trace.tb_next
    return (trace.tb_frame.f_code.co_filename, trace.tb_lineno) if trace is not None else ("", 0)


def _last_frame(error: BaseException) -> FrameType | None:
    """Return the frame of the statement that raised an error."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    return frames[-1] if frames else None


class _Named(ast.NodeTransformer):
    """Replace ``getattr(args, name)``, where ``name`` is a local name, by the attribute that it reads."""

    def __init__(self, names: Mapping[str, Any]) -> None:
        self._names = names

    def visit_Call(self, node: ast.Call) -> ast.expr:
        match node:
            case ast.Call(ast.Name("getattr"), [owner, ast.Name(name)]) if isinstance(self._names.get(name), str):
                return ast.Attribute(owner, self._names[name], ast.Load())
        return node


def _negated(test: ast.expr) -> ast.expr:
    return test.operand if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not) else ast.UnaryOp(ast.Not(), test)


def _is_presence(test: ast.expr) -> bool:
    """Return whether a condition is that an attribute has a value."""
    match test:
        case ast.Compare(ast.Attribute(), [ast.IsNot()], [ast.Constant(None)]):
            return True
    return False


def _attributes_set(node: ast.stmt) -> Iterator[str]:
    """Yield the names of the attributes that a statement, or one in it, gives a value."""
    for child in ast.walk(node):
        if isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Store):
            yield child.attr


def _call(name: str, number: int, node: ast.stmt, *more: str) -> ast.stmt:
    arguments: list[ast.expr] = [ast.Constant(number), *(ast.Name(one, ast.Load()) for one in more)]
    call = ast.Expr(ast.Call(ast.Name(name, ast.Load()), arguments, []))
    return ast.fix_missing_locations(ast.copy_location(call, node))


def _reads(test: ast.expr, made: Mapping[str, ast.expr]) -> Iterator[tuple[str, str]]:
    """Yield the attributes of arguments and configurations that a condition reads, itself or by local names (``made``)."""
    for node in ast.walk(test):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield node.value.id, node.attr
        elif isinstance(node, ast.Name) and node.id in made:
            yield from _reads(made[node.id], {name: value for name, value in made.items() if name != node.id})


_SIGNS: Final = {
    ast.Eq: "", ast.NotEq: "other than", ast.Lt: "less than", ast.LtE: "at most", ast.Gt: "more than",
    ast.GtE: "at least", ast.In: "one of", ast.NotIn: "none of", ast.Is: "", ast.IsNot: "other than",
}  # fmt: skip
_NEGATED: Final = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip


def _wanted(test: ast.expr, names: dict[str, Any], scope: dict[str, Any], negated: bool = False) -> list[Wanted]:
    """Return what would satisfy a condition, each alone enough; empty where it is no comparison."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _wanted(test.operand, names, scope, not negated)
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And if negated else ast.Or):
        return [one for value in test.values for one in _wanted(value, names, scope, negated)]
    if isinstance(test, ast.Attribute) and isinstance(test.value, ast.Name):
        return [(test.attr, "", "off" if negated else "on")]
    if not isinstance(test, ast.Compare) or len(test.ops) != 1:
        return []
    kind = _NEGATED[type(test.ops[0])] if negated else type(test.ops[0])
    left, right = test.left, test.comparators[0]
    try:
        value = eval(compile(ast.fix_missing_locations(ast.Expression(right)), "", "eval"), scope, names)
        if isinstance(left, ast.BinOp) and isinstance(left.op, ast.Mod) and kind is ast.Eq and value == 0:
            divisor = eval(compile(ast.fix_missing_locations(ast.Expression(left.right)), "", "eval"), scope, names)
            return [(left.left.attr, "a multiple of", str(divisor))] if isinstance(left.left, ast.Attribute) else []
    except Exception:  # whatever a foreign expression raises: there is no advice then
        return []
    name = left.attr if isinstance(left, ast.Attribute) else _variable(left)
    if not name or isinstance(value, ImportStandIn):
        return []
    shown = ", ".join(str(_plain(one)) for one in value) if isinstance(value, (list, tuple, set)) else str(_plain(value))
    return [(name, _SIGNS[kind], shown)]


def _variable(node: ast.expr) -> str:
    """Return ``$NAME`` for an expression that reads an environment variable."""
    match node:
        case ast.Call(ast.Attribute(ast.Attribute(attr="environ"), "get"), [ast.Constant(str(name)), *_]):
            return f"${name}"
        case ast.Call(ast.Attribute(ast.Name("os"), "getenv"), [ast.Constant(str(name)), *_]):
            return f"${name}"
        case ast.Subscript(ast.Attribute(attr="environ"), ast.Constant(str(name))):
            return f"${name}"
    return ""


def _last_line() -> str:
    """Return what was printed before an exit."""
    printed = sys.stdout.getvalue().splitlines() if isinstance(sys.stdout, io.StringIO) else []
    return printed[-1] if printed else "it exits"


def _plain(value: Any) -> Any:
    """Return a value for JSON: a number or text as it is, else the name of a member, function or class, else its text."""
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    names = (getattr(value, name, None) for name in ("name", "__name__"))
    return next((name for name in names if isinstance(name, str)), str(value))
