"""Make what Megatron's start makes of validated arguments: the calculator of micro-batches and the schedules. Child only."""

from __future__ import annotations

import ast
from ast import parse
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from copy import copy, deepcopy
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from mindspeed.workbench.lint.upstream.rewriting import Rules, Wanted, place
from mindspeed.workbench.lint.upstream.stand_ins import UndecidedError

_CALCULATOR: Final = "init_num_microbatches_calculator"
_SCHEDULER: Final = "get_optimizer_param_scheduler"
_STEPS: Final = 100_000
"""Steps of a ramp-up of the batch size that are taken, at most."""
_RELATIONS: Final = {ast.LtE: "at most", ast.Lt: "less than", ast.GtE: "at least", ast.Gt: "more than"}
_REFUSALS: Final = (AssertionError, ArithmeticError, ValueError)
"""Errors of numbers and texts, which no stand-in for a package raises."""


def start(checkout: Path, arguments: Any, rules: Rules) -> None:
    """Make each object as the start does, and collect those that refuse the arguments."""
    for kind in (_CalculatorOfMicroBatches, _Scheduler):
        made = kind(checkout, copy(arguments))
        try:
            made.make()
        except UndecidedError:
            continue
        except Exception as error:
            rule = _rule_at(*place(error))
            if rule is not None or isinstance(error, _REFUSALS):
                text, dests, wanted = made.cause(rule)
                said = " ".join(str(error).split())
                message = said if rule is not None else f"the start ends in {type(error).__name__}: {said}"
                given = {dest: getattr(made.arguments, dest) for dest in dests}
                values = {dest: value for dest, value in given.items() if value is not None and value is not False}
                rules.refused(place(error), text, message, values, wanted)


def _rule_at(file: str, line: int) -> ast.Assert | ast.Raise | None:
    """Return the assertion, or the statement that raises an error, in a line of a file."""
    rules = (node for node in ast.walk(_tree(Path(file))) if isinstance(node, (ast.Assert, ast.Raise)))
    return next((rule for rule in rules if rule.lineno <= line <= (rule.end_lineno or rule.lineno)), None)


class _CalculatorOfMicroBatches:
    """Call the constructor with the arguments of `set_global_variables`, and walk through its ramp-up as training does."""

    def __init__(self, checkout: Path, arguments: Any) -> None:
        self.arguments = arguments
        self.module: Any = import_module("megatron.core.num_microbatches_calculator")
        self.file = checkout / "megatron" / "training" / "global_vars.py"
        calls = (node for node in ast.walk(_tree(self.file)) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name))
        self.call = next((call for call in calls if ast.unparse(call.func) == _CALCULATOR), None)

    def make(self) -> None:
        if self.call is None or not getattr(self.arguments, "micro_batch_size", None):
            return
        module, arguments = self.module, self.arguments
        module._GLOBAL_NUM_MICROBATCHES_CALCULATOR = None
        eval(compile(ast.Expression(self.call), str(self.file), "eval"), vars(module) | {"args": arguments})
        ramp_up = arguments.rampup_batch_size if "rampup_batch_size" in _read([self.call]) else None
        last, consumed = min(int(ramp_up[2]), arguments.train_samples or 0) if ramp_up else 0, 0
        for _ in range(0 if _has_checkpoint(arguments.load) else _STEPS):
            if consumed > last:
                break
            module.update_num_microbatches(consumed, consistency_check=True)
            consumed += module.get_current_global_batch_size()

    def cause(self, rule: ast.Assert | ast.Raise | None) -> tuple[str, Collection[str], Sequence[Wanted]]:
        """Return no rule, the arguments of the constructor, and what mends them: a near ramp-up, or a constant size."""
        dests = [dest for dest in _read([self.call]) if dest not in ("rank", "seq_length")] if self.call is not None else []
        wanted: list[Wanted] = []
        for dest in ("rampup_batch_size", "step_batch_size_schedule"):
            if dest in dests and getattr(self.arguments, dest) is not None:
                near = self._near_ramp_up() if dest == "rampup_batch_size" else ""
                wanted += [(dest, "", value) for value in (near, "None") if value]
        return "", dests, wanted

    def _near_ramp_up(self) -> str:
        """Return a ramp-up whose sizes all ranks share, close to the given one; empty where it would have no step."""
        arguments = self.arguments
        unit = arguments.micro_batch_size * arguments.data_parallel_size
        try:
            start, increment, samples = map(int, arguments.rampup_batch_size)
        except ValueError:
            return ""
        if not unit:
            return ""
        most = arguments.global_batch_size - unit
        start = max(unit, min(start, most) // unit * unit)
        steps = (arguments.global_batch_size - start) // unit
        counts = [count for count in range(1, steps + 1) if steps % count == 0 and arguments.global_batch_size % unit == 0]
        nearest = min(counts, key=lambda count: abs(count * unit - increment), default=0)
        return f"{start} {nearest * unit} {samples if samples > 0 else arguments.global_batch_size}" if nearest else ""


class _Scheduler:
    """Call the function of the start that makes the schedules of the learning rate and of the weight decay."""

    def __init__(self, checkout: Path, arguments: Any) -> None:
        self.arguments = arguments
        self.file = checkout / "megatron" / "training" / "training.py"
        functions = (node for node in _tree(self.file).body if isinstance(node, ast.FunctionDef))
        self.tree = ast.Module([node for node in functions if node.name == _SCHEDULER], [])
        self.assigned: dict[str, list[ast.expr]] = {}
        for node in ast.walk(self.tree):
            match node:
                case ast.Assign([ast.Name(name)], value) | ast.keyword(str(name), value):
                    self.assigned.setdefault(name, []).append(value)

    def make(self) -> None:
        arguments = self.arguments
        steps = getattr(arguments, "train_iters", None) or getattr(arguments, "train_samples", None)
        if not self.tree.body or not steps or not getattr(arguments, "lr", None) or arguments.skip_train:
            return
        module = import_module("megatron.core.optimizer_param_scheduler")
        scope = vars(module) | {"get_args": lambda: arguments, "update_train_iters": lambda given: None}
        exec(compile(self.tree, str(self.file), "exec", dont_inherit=True), scope)
        scope[_SCHEDULER](SimpleNamespace(param_groups=[{}]))

    def cause(self, rule: ast.Assert | ast.Raise | None) -> tuple[str, Collection[str], Sequence[Wanted]]:
        """Return the rule in terms of arguments, those that it reads, and what mends the value that it compares."""
        test = getattr(rule, "test", None)
        if test is None:
            return "", (), ()
        text, dests = ast.unparse(_Shown(self._arguments).visit(deepcopy(test))), [*self._arguments([test])]
        wanted: list[Wanted] = []
        match test:
            case ast.Compare(left, [sign], [ast.Constant(None)]) if isinstance(sign, ast.IsNot):
                wanted = [(dest, "other than", "None") for dest in dests if getattr(self.arguments, dest) is None]
            case ast.Compare(left, [sign], [limit]) if type(sign) in _RELATIONS:
                limits = [*self._arguments([limit])]
                own = [dest for dest in self._arguments([left]) if dest not in limits and getattr(self.arguments, dest)]
                limits = [dest for dest in limits if getattr(self.arguments, dest)]
                if len(own) == len(limits) == 1:
                    wanted = [(own[0], _RELATIONS[type(sign)], str(getattr(self.arguments, limits[0])))]
                else:
                    wanted = [(dest, "", "None") for dest in own]
        return text, dests, wanted

    def _arguments(self, expressions: Iterable[ast.expr]) -> Iterator[str]:
        """Yield the arguments of which values are made, those of a constructor and local names included."""
        seen: set[str] = set()
        left = [*expressions]
        while left:
            for node in ast.walk(left.pop(0)):
                match node:
                    case ast.Attribute(ast.Name("args"), dest):
                        if dest not in seen:
                            seen.add(dest)
                            yield dest
                    case ast.Attribute(ast.Name("self"), name) | ast.Name(name) if name not in seen:
                        seen.add(name)
                        left += self.assigned.get(name, ())


class _Shown(ast.NodeTransformer):
    """Write the argument that gives an attribute in its place, and the name of one that several give."""

    def __init__(self, arguments: Callable[[Iterable[ast.expr]], Iterator[str]]) -> None:
        self._arguments = arguments

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        dests = [*self._arguments([node])]
        return ast.Attribute(ast.Name("args"), dests[0]) if len(dests) == 1 else ast.Name(node.attr)


def _read(expressions: Iterable[ast.AST]) -> list[str]:
    """List the arguments that expressions read."""
    nodes = (node for expression in expressions for node in ast.walk(expression))
    return [node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]


def _has_checkpoint(folder: str | None) -> bool:
    """Return whether a job goes on with a checkpoint, so that it need not take the sizes of the first batches."""
    return bool(folder) and Path(str(folder), "latest_checkpointed_iteration.txt").is_file()


@lru_cache(maxsize=8)
def _tree(file: Path) -> ast.Module:
    """Return the statements of a module; none of one that is missing, or is for another Python."""
    try:
        return parse(file.read_text(encoding="utf-8", errors="replace"))
    except (OSError, SyntaxError):
        return ast.Module([], [])
