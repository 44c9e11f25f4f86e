"""Conditions of a feature: named functions over its arguments and the job, evaluated at every stage by the same code.

The stages are optimization level 1, the plan, the arguments that Megatron-LM has parsed, the configuration that a process
builds, and the search of a layout. What only a live module can decide is a `ModelCondition`.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal

from mindspeed.job.world import FIELDS, UnknownValue, World
from mindspeed.problems import Fix, Fixes, Text, filled
from mindspeed.process.watchdog import RUNNING

Predicate = Callable[..., bool]
"""``(args, world) -> bool``; reads only the feature's own arguments and the job."""

TextValues = Callable[[Any, Any], Mapping[str, Any]]
"""``(args, world) -> values``: further names for the texts of a condition."""


Otherwise = Literal["refuse", "warn", "idle", "skip"]
"""Consequences of a condition that does not hold."""


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition on a feature's own arguments and the job.

    ``message`` and the strings of ``fix`` are format strings over ``args``, ``world`` and ``feature``, the name of the
    declaring feature: ``"window {args.window} does not divide the context-parallel size {world.cp}"``. Where the condition
    does not hold, a requested feature is refused; with ``otherwise`` "warn" the plan has a warning, with "idle" a note that
    the feature has nothing to do. Optimization level 1 skips the feature in the first and the last case; with "skip" it alone
    asks. ``when`` limits the condition to some settings and jobs. ``of`` names another feature: the function takes its
    arguments too, ``(args, world, other)``, and is asked where that feature is active. ``values(args, world)`` adds names to
    the texts. ``selects`` is for what tells models of the feature from others: a configuration that is built beside and
    does not fulfil it, such as the dense vision encoder of a MoE model, is left alone. ``served`` is set by the declaration:
    the parallel size that the feature serves in its slot. At size 1 nothing is asked.
    """

    holds: Predicate
    message: str
    fix: Fixes = ()
    when: Predicate | None = None
    otherwise: Otherwise = "refuse"
    of: str = ""
    values: TextValues | None = None
    selects: bool = False
    served: str = ""

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.holds.__name__

    @property
    def about(self) -> str:
        """The first line of the function's docstring."""
        return (inspect.getdoc(self.holds) or "").partition("\n")[0]

    @property
    def where(self) -> str:
        """``package/module.py:line`` of the function."""
        code = getattr(self.holds, "__code__", None)
        if code is None:
            return str(getattr(self.holds, "__module__", ""))
        root = (self.holds.__module__ or "").partition(".")[0]
        parts = Path(code.co_filename).parts
        inside = parts[parts.index(root) :] if root in parts else parts[-1:]
        return f"{'/'.join(inside)}:{code.co_firstlineno}"

    @staticmethod
    def unset(
        field: str, message: str, fix: Fixes = (), when: Predicate | None = None, otherwise: Otherwise = "refuse"
    ) -> Condition:
        """Require that a field of the job is not given, false or 0; what is not known passes until the configuration is built.

        Without a ``fix`` it is to give the field false or 0, or to remove the feature.
        """
        empty = 0 if field in FIELDS and FIELDS[field].kind is not bool else False
        usual = (Fix.give_field(field, empty), Fix.remove_feature())
        return _stated(f"no_{field}", lambda world: not world.is_set(field), message, fix or usual, when, otherwise)

    @staticmethod
    def equals(
        field: str, value: Any, message: str, fix: Fixes = (), when: Predicate | None = None, otherwise: Otherwise = "refuse"
    ) -> Condition:
        """Require that a field of the job has a value. Without a ``fix`` it is to give it that, or to remove the feature."""
        usual = (Fix.give_field(field, value), Fix.remove_feature())
        name = f"{field}_is_{value}"
        return _stated(name, lambda world: getattr(world, field) == value, message, fix or usual, when, otherwise)

    @staticmethod
    def at_least(
        field: str,
        number: int,
        message: str,
        fix: Fixes = (),
        when: Predicate | None = None,
        otherwise: Otherwise = "refuse",
        selects: bool = False,
    ) -> Condition:
        """Require that a field of the job has at least a number. Without a ``fix`` it is to give it that or more."""
        usual = (Fix.give_field(field, number, or_more=True), Fix.remove_feature())
        name = f"{field}_is_at_least_{number}"
        return _stated(name, lambda world: getattr(world, field) >= number, message, fix or usual, when, otherwise, selects)

    @staticmethod
    def at_most(
        field: str, number: int, message: str, fix: Fixes = (), when: Predicate | None = None, otherwise: Otherwise = "refuse"
    ) -> Condition:
        """Require that a field of the job has at most a number. Without a ``fix`` it is to give it that or less."""
        usual = (Fix.give_field(field, number, "or less"), Fix.remove_feature())
        name = f"{field}_is_at_most_{number}"
        return _stated(name, lambda world: getattr(world, field) <= number, message, fix or usual, when, otherwise)

    @staticmethod
    def divides(
        field: str,
        factors: str | tuple[str | int, ...],
        message: str,
        fix: Fixes = (),
        when: Predicate | None = None,
        otherwise: Otherwise = "refuse",
    ) -> Condition:
        """Require that the product of ``factors`` divides a field: numbers, fields of the job, and settings (``args.size``).

        Without a ``fix`` it is to give the field a multiple of the product, or to remove the feature.
        """
        numbers = (factors,) if isinstance(factors, str) else factors

        def holds(args: Any, world: World) -> bool:
            return bool(getattr(world, field) % prod(_factor(factor, args, world) for factor in numbers) == 0)

        named = " x ".join(str(factor).removeprefix("args.") for factor in numbers)
        holds.__name__ = f"{field}_is_a_multiple_of_{named}".replace(" x ", "_x_")
        holds.__doc__ = f"Check that {field} is a multiple of {named}."
        values = (
            f"{{{factor if '.' in factor else f'world.{factor}'}}}" if isinstance(factor, str) else factor for factor in numbers
        )
        usual = (Fix.give_field(field, note=f"a multiple of {' x '.join(map(str, values))}"), Fix.remove_feature())
        return Condition(holds, message, fix or usual, when, otherwise)


def _factor(factor: str | int, args: Any, world: World) -> int:
    if isinstance(factor, int):
        return factor
    holder, _, name = factor.rpartition(".")
    return int(getattr(args if holder else world, name))


def _stated(
    name: str,
    test: Callable[[World], bool],
    message: str,
    fix: Fixes,
    when: Predicate | None,
    otherwise: Otherwise,
    selects: bool = False,
) -> Condition:
    """Make a condition on the job alone; its name is its documentation."""

    def holds(args: Any, world: World) -> bool:
        return bool(test(world))

    holds.__name__ = name
    holds.__doc__ = f"Check that {name.replace('_', ' ')}."
    return Condition(holds, message, fix, when, otherwise, selects=selects)


def condition(
    message: str,
    *,
    fix: Fixes = (),
    when: Predicate | None = None,
    otherwise: Otherwise = "refuse",
    of: str = "",
    values: TextValues | None = None,
    selects: bool = False,
) -> Callable[[Predicate], Condition]:
    """Make a condition of a named function with a docstring; it is listed in ``FeatureSpec.constraints``."""

    def declare(holds: Predicate) -> Condition:
        return Condition(holds, message, fix, when, otherwise, of, values, selects)

    return declare


@dataclass(frozen=True, slots=True)
class ModelCondition:
    """A condition that only a live object can decide, such as the class of a layer in a script.

    ``function`` is ``module:name`` of a function ``(feature, subject) -> Iterable[str]`` that returns what is wrong, imported
    when the ``subject`` exists: the layer ``spec`` (with its configuration as a third argument), the ``model`` chunks or the
    ``optimizer``. ``message`` states the requirement; the plan lists it as checked when the model is built. A requested
    feature is refused there, one that level 1 alone switched on steps aside.
    """

    function: str
    message: str
    subject: Literal["spec", "model", "optimizer"] = "model"
    fix: Fixes = ()
    when: Predicate | None = None


class ConditionError(Exception):
    """The function of a condition failed: a mistake of its author."""


def obstacle(constraints: Iterable[Any], feature: str, args: Any, world: World) -> Failure | None:
    """Return the first condition on the feature alone that keeps it from doing something in this job; None without one.

    Raises as `failure` does.
    """
    for condition in conditions(constraints):
        if not condition.of and condition.otherwise != "warn" and (found := failure(condition, feature, args, world)):
            return found
    return None


@dataclass(frozen=True, slots=True)
class Failure:
    """A condition that does not hold, with its texts filled in."""

    condition: Condition
    message: str
    fix: Fixes


def failure(condition: Condition, feature: str, args: Any, world: World, other: Any = None) -> Failure | None:
    """Ask a condition; None where it holds, or where its ``when`` does not.

    Raises `UnknownValue` for a value that nobody gave, and ConditionError for a function that fails or returns no bool.
    """
    if is_met(condition, args, world, other):
        return None
    return Failure(condition, *texts(condition, feature, args, world, other))


def is_met(condition: Condition, args: Any, world: World, other: Any = None) -> bool:
    """Return whether a condition holds, or does not count in this job. Raises as `failure` does."""
    if condition.served and getattr(world, condition.served) == 1:
        return True
    if condition.when is not None and not _asked(condition.when, args, world):
        return True
    return _asked(condition.holds, args, world, *((other,) if condition.of else ()))


def _asked(function: Predicate, *arguments: Any) -> bool:
    RUNNING.append(("a condition", function))
    try:
        answer = function(*arguments)
    except UnknownValue:
        raise
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a plugin's function may fail in any way; its author must be named, and others go on
        raise ConditionError(f"raised {type(error).__name__}: {error}") from error
    finally:
        RUNNING.pop()
    if not isinstance(answer, bool):
        raise ConditionError(f"returned {answer!r}, not True or False")
    return answer


def texts(condition: Condition, feature: str, args: Any, world: Any, other: Any = None) -> tuple[str, Fixes]:
    """Return the message and the fix of a condition for one feature and job. Raises ConditionError for a bad format string."""
    names: Mapping[str, Any] = {"args": args, "world": world, "other": other, "feature": feature}
    try:
        if isinstance(world, Loose):
            names = defaultdict(_Unknown, names)
        elif condition.values is not None:
            names = {**condition.values(args, world), **names}
        fix = filled(condition.fix, feature, lambda text: Text.filled(text, names))
        return Text.filled(condition.message, names), fix
    except UnknownValue:
        raise
    except Exception as error:  # a format string or values of a plugin may fail in any way
        raise ConditionError(f"has a message or fix that cannot be formatted: {type(error).__name__}: {error}") from error


class Loose:
    """A job for messages only: an unknown value reads as a question mark."""

    def __init__(self, world: World) -> None:
        self._world = world

    def __getattr__(self, name: str) -> object:
        return getattr(self._world, name) if self._world.knows(name) else _Unknown()


class _Unknown:
    """A value that nobody gave: arithmetic and formatting give a question mark again."""

    def __format__(self, spec: str) -> str:
        return "?"

    def _again(self, *_: object) -> _Unknown:
        return self

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __floordiv__ = __rfloordiv__ = _again
    __truediv__ = __rtruediv__ = __mod__ = __rmod__ = __neg__ = __getitem__ = _again

    def __str__(self) -> str:
        return "?"


def conditions(constraints: Iterable[Any]) -> Sequence[Condition]:
    """Return the conditions among constraints."""
    return [constraint for constraint in constraints if isinstance(constraint, Condition)]
