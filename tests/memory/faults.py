"""Faults to plant in what parks and waits. Applied in the workers of the pool."""

from typing import Any

from mindspeed.plugins.patches import Function, wrapper


@wrapper
def nothing_leaves(original: Function, *args: Any, **kwargs: Any) -> None:
    """Around a method that parks storages: they stay where they are."""


@wrapper
def not_waited_for(original: Function, *args: Any, **kwargs: Any) -> None:
    """Around a method that waits for contents: what follows goes on without them."""


@wrapper
def used_in_flight(original: Function, self: Any) -> None:
    """Around the wait for main weights and states: they are used as soon as their copy has begun."""
    for place in self._arrived:
        place()
    self._pairs.clear()
    self._arrived.clear()
