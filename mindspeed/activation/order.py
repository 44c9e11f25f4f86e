"""Order of activation: topological, ties by name, so equal on every rank whatever the order of the request."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from itertools import pairwise


class Edges:
    """Who must come before whom, over a fixed set of names, and who declared it."""

    def __init__(self, names: Iterable[str]) -> None:
        self._after: dict[str, set[str]] = {name: set() for name in names}
        self._declared: dict[tuple[str, str], str] = {}

    def add(self, first: str, second: str, declared_by: str) -> None:
        """``first`` comes before ``second``; ignored unless both are among the names."""
        if first in self._after and second in self._after:
            self._after[first].add(second)
            self._declared.setdefault((first, second), declared_by)

    def sorted(self) -> list[str]:
        """The names in order; those on or behind a cycle are missing."""
        waiting = dict.fromkeys(self._after, 0)
        for seconds in self._after.values():
            for second in seconds:
                waiting[second] += 1
        ready = [name for name, count in waiting.items() if count == 0]
        heapq.heapify(ready)
        order = []
        while ready:
            name = heapq.heappop(ready)
            order.append(name)
            for second in self._after[name]:
                waiting[second] -= 1
                if waiting[second] == 0:
                    heapq.heappush(ready, second)
        return order

    def cycle(self, order: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
        """One cycle among the names that ``order`` lacks: its path, first name repeated, and a sentence per edge."""
        left = sorted(self._after.keys() - set(order))
        before = {second: first for first in reversed(left) for second in self._after[first] if second in left}
        path: list[str] = []
        name = left[0]
        while name not in path:
            path.append(name)
            name = before[name]
        cycle = [name, *reversed(path[path.index(name) :])]
        steps = tuple(
            f"{first} comes before {second}, declared by {self._declared[first, second]}" for first, second in pairwise(cycle)
        )
        return cycle, steps
