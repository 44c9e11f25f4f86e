"""Traces of a run in one process: how often the patch sites and the hooks of each feature were reached."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import CodeType, FunctionType
from typing import Any, Final

from mindspeed.activation.session import Session
from mindspeed.plugins.hookspecs import PlanHooks
from mindspeed.verification.record import Record

Function = Callable[..., Any]
_ASKED_WHILE_PLANNING: Final = frozenset(name for name in vars(PlanHooks) if not name.startswith("_"))


@contextmanager
def evidence(session: Session, record: Record) -> Iterator[None]:
    """Count into ``record`` while the block runs. The session stays active that long."""
    _count_hooks(session, record)
    with ExitStack() as stack:
        for planned in session.plan.patches:
            function = None if planned.ground or planned.skipped else _function_at(planned.site)
            if function is not None:
                counts = record.sites.setdefault(planned.owner, {})
                counts[planned.site] = 0
                stack.enter_context(calls_counted(function, counts, planned.site))
        yield


@contextmanager
def calls_counted(function: FunctionType, counts: dict[str, int], key: str) -> Iterator[None]:
    """Count the calls of a function into ``counts[key]``, whoever holds it and under whatever name.

    Its code is exchanged for one that counts and then runs the original, so no holder has to be found or changed.
    """
    code = function.__code__
    original = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    original.__kwdefaults__ = function.__kwdefaults__

    def count(*args: Any, **kwargs: Any) -> Any:
        counts[key] = counts.get(key, 0) + 1
        return original(*args, **kwargs)

    function.__code__ = _code_that_calls(count, code)
    try:
        yield
    finally:
        function.__code__ = code


def _code_that_calls(target: Function, model: CodeType) -> CodeType:
    """Code that passes all its arguments to ``target``, for a function with the closure variables of ``model``."""

    def template(*args: Any, **kwargs: Any) -> Any:
        target: Any = "target"
        return target(*args, **kwargs)

    constants = tuple(target if constant == "target" else constant for constant in template.__code__.co_consts)
    return template.__code__.replace(co_consts=constants, co_freevars=model.co_freevars, co_name=model.co_name)


def _function_at(site: str) -> FunctionType | None:
    """The function bound at a site, or what makes an instance of the class bound there; None for anything else."""
    module, _, path = site.partition(":")
    try:
        value: Any = importlib.import_module(module)
    except ImportError:  # a part of Megatron that cannot be imported here is not reached either
        return None
    for name in path.split("."):
        value = inspect.getattr_static(value, name, None)
    value = getattr(value, "__func__", value)
    if isinstance(value, type):
        value = value.__init__  # type: ignore[misc]
    return value if isinstance(value, FunctionType) else None


def _count_hooks(session: Session, record: Record) -> None:
    hooks = session.manager.hook
    for hook in vars(hooks):
        if not hook.startswith("_") and hook not in _ASKED_WHILE_PLANNING:
            for implementation in getattr(hooks, hook).get_hookimpls():
                counts = record.hooks.setdefault(implementation.plugin_name, {})
                implementation.function = _counted(implementation.function, counts, hook)


def _counted(function: Function, counts: dict[str, int], key: str) -> Function:
    @functools.wraps(function)
    def counted(*args: Any) -> Any:
        counts[key] = counts.get(key, 0) + 1
        return function(*args)

    return counted
