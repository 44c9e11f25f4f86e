"""Counting the calls of a function without standing in its way: the count lives in its code object.

The function stays the same object for every holder, and when counting ends it has its own code object back.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any


class CallCount:
    """Counts the calls of one function from now until `stop`; who inspects its signature sees no difference."""

    __slots__ = ("_code", "_function", "_signed", "calls")

    def __init__(self, function: FunctionType) -> None:
        self.calls = 0
        self._function = function
        self._code = function.__code__
        self._signed = "__wrapped__" not in function.__dict__ and "__signature__" not in function.__dict__
        signature = inspect.signature(function) if self._signed else None
        original = FunctionType(
            self._code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
        )
        original.__kwdefaults__ = function.__kwdefaults__

        def count(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return original(*args, **kwargs)

        if self._signed:
            function.__signature__ = signature  # type: ignore[attr-defined]
        function.__code__ = _code_that_calls(count, self._code)

    def stop(self) -> None:
        """Give the function its own code back; harmless the second time."""
        self._function.__code__ = self._code
        if self._signed:
            self._function.__dict__.pop("__signature__", None)


def _code_that_calls(target: Callable[..., Any], model: CodeType) -> CodeType:
    """Code that passes all its arguments to ``target``, for a function with the closure variables of ``model``."""

    def template(*args: Any, **kwargs: Any) -> Any:
        target: Any = "target"
        return target(*args, **kwargs)

    constants = tuple(target if constant == "target" else constant for constant in template.__code__.co_consts)
    return template.__code__.replace(co_consts=constants, co_freevars=model.co_freevars, co_name=model.co_name)
