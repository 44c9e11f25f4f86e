"""Order of activation: topological, ties by name, so equal on every rank whatever the order of the request."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from graphlib import CycleError, TopologicalSorter


def in_order(names: Iterable[str], edges: Iterable[tuple[str, str]]) -> tuple[list[str], list[str]]:
    """Sort names by ``(first, second)`` edges; an edge to any other name is ignored.

    Returns the order, and a cycle from its smallest name back to it, of which one is empty.
    """
    before: dict[str, list[str]] = {name: [] for name in sorted(names)}
    for first, second in edges:
        if first in before and second in before:
            before[second].append(first)
    sorter = TopologicalSorter(before)
    try:
        sorter.prepare()
    except CycleError as error:
        cycle = error.args[1][:-1]
        start = cycle.index(min(cycle))
        return [], [*cycle[start:], *cycle[: start + 1]]
    ready, order = list(sorter.get_ready()), []
    heapq.heapify(ready)
    while ready:
        name = heapq.heappop(ready)
        order.append(name)
        sorter.done(name)
        for following in sorter.get_ready():
            heapq.heappush(ready, following)
    return order, []
