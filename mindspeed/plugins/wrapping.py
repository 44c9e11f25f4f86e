"""Wrappers of upstream functions as one function each."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

Function = Callable[..., Any]


def wrapper(function: Function) -> Callable[[Function], Function]:
    """Make the ``wrapper(original) -> callable`` that a `Wrap` names of ``function(original, *args, **kwargs)``.

    A call costs one frame more than a closure that is written out: not for what is called in a layer's forward.
    """

    @functools.wraps(function)
    def factory(original: Function) -> Function:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

        return call

    return factory
