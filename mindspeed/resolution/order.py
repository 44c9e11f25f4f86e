"""Order of activation: topological, ties by name, so equal on every rank whatever the order of the request."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence


class Edges:
    """Who must come before whom, over a fixed set of names; an edge to any other name is ignored."""

    def __init__(self, names: Iterable[str], edges: Iterable[tuple[str, str]]) -> None:
        self._after: dict[str, list[str]] = {name: [] for name in names}
        self._waiting = dict.fromkeys(self._after, 0)
        for first, second in edges:
            if first in self._after and second in self._waiting:
                self._after[first].append(second)
                self._waiting[second] += 1

    def sorted(self) -> list[str]:
        """The names in order; those on or behind a cycle are missing."""
        waiting = self._waiting.copy()
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

    def cycle(self, order: Sequence[str]) -> list[str]:
        """One cycle among the names that ``order`` lacks, the first name repeated at the end."""
        left = sorted(self._after.keys() - set(order))
        before = {second: first for first in reversed(left) for second in self._after[first] if second in left}
        path: list[str] = []
        name = left[0]
        while name not in path:
            path.append(name)
            name = before[name]
        return [name, *reversed(path[path.index(name) :])]
