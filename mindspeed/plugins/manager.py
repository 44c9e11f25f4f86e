"""The pluggy manager of one plan: plan order, chained values, errors that name the feature."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import is_dataclass
from functools import cache
from types import CodeType
from typing import Any, Final

import pluggy

from mindspeed.plugins.active import MakeRange
from mindspeed.plugins.answers import asked
from mindspeed.plugins.feature import Feature
from mindspeed.plugins.hookspecs import HOOK_CLASSES, HOOKS, PROJECT, HookFacts
from mindspeed.problems import MindSpeedError, Problem, advice, near_names, suggestion
from mindspeed.process.tracing import trace

_MARK: Final = f"{PROJECT}_impl"


class FeatureManager(pluggy.PluginManager):
    """Holds the feature instances of one plan, in plan order.

    Hooks of a feature whose parallel size is 1 are not called, but for the arguments of Megatron that the owner of a size sets.
    pluggy calls the last registered implementation first; features are therefore registered in reverse,
    and `call` gives one result per feature that has the hook, in plan order. ``calls`` counts them by (feature, hook),
    ``effects`` those that did something: changed what they were given to change, returned an answer where None is one of
    none, or ran at all where a hook is only told of an event. With ``make_range`` calls run inside ``make_range(feature)``.
    Raises MindSpeedError with MS104 for every method that is marked as a hook and does not match one.
    """

    def __init__(self, features: Sequence[Feature[Any]]) -> None:
        super().__init__(PROJECT)
        for name, spec in _specifications().items():
            caller = pluggy.HookCaller(name, self._hookexec)
            caller.spec = spec
            setattr(self.hook, name, caller)
        self.features = tuple(features)
        self.calls: Counter[tuple[str, str]] = Counter()
        self.effects: Counter[tuple[str, str]] = Counter()
        self.make_range: MakeRange | None = None
        if problems := [problem for feature in self.features for problem in self._mismatches(type(feature))]:
            raise MindSpeedError(problems)
        for feature in reversed(self.features):
            self.register(feature, feature.spec.name)

    def parse_hookimpl_opts(self, plugin: Any, name: str) -> Any:
        """Return the mark of `hookimpl` on a method. Hooks are methods of the class, so nothing else is searched."""
        marked = getattr(getattr(type(plugin), name, None), _MARK, None) if name[0] != "_" else None
        sets_size = name == "megatron_args" and bool(plugin.spec.sizes)
        if marked is None or (not sets_size and plugin.spec.idle_size(plugin.world) is not None):
            return None
        vars(plugin)[name] = getattr(plugin, name)  # pluggy looks there first; its static search is most of its time
        return marked

    def _mismatches(self, feature: type[Feature[Any]]) -> Iterator[Problem]:
        """MS104 for every marked method that is no hook, or has a parameter that its hook does not have."""
        owner = feature.spec.name
        for name in dir(feature):
            method = getattr(feature, name, None) if name[0] != "_" else None
            if getattr(method, _MARK, None) is None or method is None:
                continue
            if name not in HOOKS:
                fix = suggestion(
                    near_names(name, HOOKS), "rename the method to a hook of mindspeed docs hooks, or remove @hookimpl"
                )
                text = f"the method {name!r} of the feature '{owner}' is marked @hookimpl, but no hook has this name"
                yield Problem("MS104", text, (owner,), where=_source_line(method), fix=advice(fix))
                continue
            known = getattr(self.hook, name).spec.argnames
            if foreign := [parameter for parameter in _parameters(method) if parameter not in known]:
                text = f"the hook '{name}' of the feature '{owner}' has the unknown parameter {', '.join(foreign)}"
                fix = f"use any of {', '.join(known)}" if known else "remove the parameter"
                yield Problem("MS104", text, (owner,), where=_source_line(method), fix=advice(fix))

    def owners(self, hook: str) -> set[str]:
        """Return the features of the plan that implement ``hook``."""
        return {implementation.plugin_name for implementation in getattr(self.hook, hook).get_hookimpls()}

    def call(self, hook: str, without: Collection[str] = (), **arguments: Any) -> list[tuple[str, Any]]:
        """Call ``hook`` on every feature that has it, but those of ``without``: ``[(feature, result)]`` in plan order."""
        return [(name, call(arguments)) for name, call in self._implementations(hook) if name not in without]

    def answers(self, hook: str, **arguments: Any) -> list[tuple[str, Any]]:
        """Call ``hook`` and skip the features that returned None."""
        return [(name, answer) for name, answer in self.call(hook, **arguments) if answer is not None]

    def chain(self, hook: str, without: Collection[str] = (), **arguments: Any) -> Any:
        """Pass the value of ``hook`` through the features: each gets what the one before returned, None returns it as it is."""
        value = HOOKS[hook].value
        for name, call in self._implementations(hook):
            answer = call(arguments) if name not in without else None
            arguments[value] = arguments[value] if answer is None else answer
        return arguments[value]

    @contextmanager
    def around(self, hook: str, **arguments: Any) -> Iterator[None]:
        """Enter the context managers that the features return from ``hook``, the first feature outermost."""
        with ExitStack() as stack:
            for _, entered in self.answers(hook, **arguments):
                stack.enter_context(entered)
            yield

    def _implementations(self, hook: str) -> Iterator[tuple[str, Callable[[dict[str, Any]], Any]]]:
        facts = HOOKS[hook]
        for impl in reversed(getattr(self.hook, hook).get_hookimpls()):

            def call(arguments: dict[str, Any], impl: pluggy.HookImpl = impl) -> Any:
                self.calls[impl.plugin_name, hook] += 1
                trace("hook", f"{hook} of {impl.plugin_name}")
                before = snapshot(arguments[facts.value]) if facts.value else None
                with nullcontext() if self.make_range is None else self.make_range(impl.plugin_name):
                    given = (arguments[name] for name in impl.argnames)
                    result = asked(hook, impl.plugin, lambda: impl.function(*given))
                self.effects[impl.plugin_name, hook] += _did_something(facts, arguments, before, result)
                return result

            yield impl.plugin_name, call


@cache
def _specifications() -> dict[str, Any]:
    """Read the specification of every hook, once for all plans: it takes pluggy longer than their features do."""
    reader = pluggy.PluginManager(PROJECT)
    for hooks in HOOK_CLASSES:
        reader.add_hookspecs(hooks)
    return {name: caller.spec for name, caller in vars(reader.hook).items()}


def _did_something(facts: HookFacts, arguments: dict[str, Any], before: object, result: Any) -> bool:
    if facts.value:
        return snapshot(arguments[facts.value] if result is None else result) != before
    return result is not None or not facts.none


def _parameters(method: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the parameters of a method but the first; `inspect.signature` would take most of the time."""
    code: CodeType = inspect.unwrap(method).__code__
    return code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]


def _source_line(function: Callable[..., Any]) -> str:
    """Return ``file:line`` of a function."""
    code = inspect.unwrap(function).__code__
    return f"{code.co_filename}:{code.co_firstlineno}"


_PLAIN = (str, bytes, int, float, complex, type(None))


class _Leaf:
    """An object that is compared by identity, and kept alive until then."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Leaf) and other.value is self.value

    __hash__ = None  # type: ignore[assignment]


def snapshot(value: object) -> object:
    """Return an object that equals the later snapshot of ``value`` while nothing in it has changed.

    Dataclasses, lists, tuples and dictionaries are copied down to their leaves. Plain values are compared by type and
    value, every other object by identity.
    """
    return _copy(value, {})


def _copy(value: object, seen: dict[int, int]) -> object:
    if isinstance(value, _PLAIN):
        return (type(value), value)
    if not isinstance(value, list | tuple | dict) and (isinstance(value, type) or not is_dataclass(value)):
        return _Leaf(value)
    if id(value) in seen:  # shared, or a cycle
        return ("seen", seen[id(value)])
    seen[id(value)] = len(seen)
    if isinstance(value, list | tuple):
        return (type(value), [_copy(item, seen) for item in value])
    items: dict[Any, Any] = value if isinstance(value, dict) else _attributes(value)
    return (type(value), [(_copy(key, seen), _copy(item, seen)) for key, item in items.items()])


def _attributes(value: object) -> dict[str, object]:
    """Return the attributes that a dataclass instance has by now; a field may be missing while it is initialised."""
    slots = (name for base in type(value).__mro__ for name in vars(base).get("__slots__", ()))
    return {**getattr(value, "__dict__", {}), **{name: getattr(value, name) for name in slots if hasattr(value, name)}}
