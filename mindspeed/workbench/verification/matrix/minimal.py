"""Find a smallest failing part of a set with few runs. Light."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def minimal(items: Sequence[Item], fails: Callable[[tuple[Item, ...]], bool]) -> tuple[Item, ...]:
    """Return a subset of ``items`` that fails and from which nothing can be removed; ``items`` as a whole must fail.

    One culprit of n takes about log2(n) + 2 questions, k of them k times as many: the shortest failing beginning ends with a
    culprit, which then stands first when the beginning before it is searched (QuickXplain, Junker 2004). Where failing is not
    monotone, items that need one another are found by leaving each out of what remains.
    """
    found: tuple[Item, ...] = ()
    rest = tuple(items)
    while not found or not fails(found):
        if not rest:
            return _without_needless(tuple(items), fails)
        length = _shortest_failing(found, rest, fails)
        found, rest = (rest[length - 1], *found), rest[: length - 1]
    return _without_needless(found, fails)


def _shortest_failing(found: tuple[Item, ...], rest: tuple[Item, ...], fails: Callable[[tuple[Item, ...]], bool]) -> int:
    """The length of the shortest beginning of ``rest`` that fails together with ``found``; all of it is taken to fail."""
    low, high = 1, len(rest)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fails((*found, *rest[:middle])) else (middle + 1, high)
    return low


def _without_needless(items: tuple[Item, ...], fails: Callable[[tuple[Item, ...]], bool]) -> tuple[Item, ...]:
    """Leave out every item without which the rest still fails."""
    kept = items
    for item in items if len(items) > 1 else ():
        fewer = tuple(other for other in kept if other is not item)
        if fewer and fails(fewer):
            kept = fewer
    return kept
