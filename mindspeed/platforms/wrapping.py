"""Write a wrapper as one function: the original first, then the arguments of the call."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

Function = Callable[..., Any]


def wrapper(call: Function) -> Callable[[Function], Function]:
    """Turn ``call(original, *args, **kwargs)`` into ``wrapper(original) -> function``, the form that a `Wrap` names."""

    @wraps(call)
    def bind(original: Function) -> Function:
        @wraps(original)
        def bound(*args: Any, **kwargs: Any) -> Any:
            return call(original, *args, **kwargs)

        return bound

    return bind
