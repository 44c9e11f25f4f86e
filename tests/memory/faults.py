"""Faults to plant in what parks and waits. Applied in the workers of the pool."""

import functools
from collections.abc import Callable
from typing import Any

Function = Callable[..., Any]


def nothing_leaves(original: Function) -> Function:
    """Around a method that parks storages: they stay where they are."""

    @functools.wraps(original)
    def park(*args: Any, **kwargs: Any) -> None:
        return None

    return park


def not_waited_for(original: Function) -> Function:
    """Around a method that waits for contents: what follows goes on without them."""

    @functools.wraps(original)
    def wait(*args: Any, **kwargs: Any) -> None:
        return None

    return wait


def used_in_flight(original: Function) -> Function:
    """Around the wait for main weights and states: they are used as soon as their copy has begun."""

    @functools.wraps(original)
    def wait(self: Any) -> None:
        for place in self._arrived:
            place()
        self._pairs.clear()
        self._arrived.clear()

    return wait
