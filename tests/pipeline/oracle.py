"""An independent scheduler: active schedules of the operations of a pipeline as a graph (Giffler and Thompson, 1960).

Of all operations that may run, the one that would end first decides the rank. One of those that can begin on this rank before
that end is next. A depth-first search follows every such choice up to a number of steps, and draws follow one choice each.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from mindspeed.pipeline.operations import Costs, PipelineShape
from mindspeed.pipeline.synthesis import megatron

Node = tuple[str, int, int]
"""Kind, stage and micro-batch."""
SMALL: Final = 300
"""Operations of a pipeline that is searched in depth."""


@dataclass
class Graph:
    """Operations with what must follow each: the operation that waits for it, and the time between."""

    duration: dict[Node, float]
    rank: dict[Node, int]
    after: dict[Node, list[tuple[Node, float]]]
    limit: int
    room: dict[Node, int]
    tail: dict[Node, float] = field(default_factory=dict)


def graph(shape: PipelineShape, costs: Costs, limit: int | None) -> Graph:
    last = shape.stages - 1
    micro_batches = range(shape.micro_batches)
    nodes = [(kind, stage, m) for kind in "FBW" for stage in range(shape.stages) for m in micro_batches]
    after: dict[Node, list[tuple[Node, float]]] = {node: [] for node in nodes}
    for kind, stage, m in nodes:
        if m + 1 < shape.micro_batches:
            after[kind, stage, m].append(((kind, stage, m + 1), 0.0))
        ahead = {"F": stage + 1, "B": stage - 1, "W": -1}[kind]
        if 0 <= ahead <= last:
            after[kind, stage, m].append(((kind, ahead, m), costs.hop if shape.rank_of(ahead) != shape.rank_of(stage) else 0.0))
        if kind == "B":
            after[kind, stage, m].append((("W", stage, m), 0.0))
    for m in micro_batches:
        after["F", last, m].append((("B", last, m), 0.0))
    if shape.placement == "loop":
        for rank in range(shape.pp):
            forwards = [
                ("F", shape.stage_of(rank, op.chunk), op.micro_batch) for op in megatron(shape).ops[rank] if op.kind == "F"
            ]
            for first, second in itertools.pairwise(forwards):
                after[first].append((second, 0.0))
    chunk = {shape.stage_of(rank, chunk): chunk for rank in range(shape.pp) for chunk in range(shape.vpp)}
    spare = {node: shape.vpp - 1 - chunk[node[1]] if shape.placement == "v" else 0 for node in nodes}
    made = Graph(
        {node: costs.of(node[0], node[1]) for node in nodes},  # type: ignore[arg-type]
        {node: shape.rank_of(node[1]) for node in nodes},
        after,
        len(nodes) if limit is None else limit,
        spare,
    )
    for node in _backwards(after):
        made.tail[node] = max((lag + made.duration[other] + made.tail[other] for other, lag in after[node]), default=0.0)
    return made


def _backwards(after: dict[Node, list[tuple[Node, float]]]) -> Iterator[Node]:
    """Yield every node behind all that follow it."""
    left = {node: len(others) for node, others in after.items()}
    before: dict[Node, list[Node]] = {node: [] for node in after}
    for node, others in after.items():
        for other, _ in others:
            before[other].append(node)
    ready = [node for node, count in left.items() if not count]
    while ready:
        yield (node := ready.pop())
        for other in before[node]:
            left[other] -= 1
            if not left[other]:
                ready.append(other)


class Oracle:
    """The shortest makespan that a number of steps finds."""

    def __init__(self, shape: PipelineShape, costs: Costs, limit: int | None = None) -> None:
        self.graph = graph(shape, costs, limit)
        self.pp = shape.pp
        self.best = float("inf")

    def shortest(self, steps: int, draws: int, seed: int = 0) -> float:
        draw = random.Random(seed)
        mean = sum(self.graph.duration.values()) / len(self.graph.duration)
        for number in range(draws):
            reach = 0.0 if number == 0 else mean * draw.choice((0.5, 2.0, 8.0))
            self._reset()
            while self.ready:
                choices = self._choices()
                if not choices:
                    break
                chosen = max(
                    choices, key=lambda node: self.graph.tail[node] + self.graph.duration[node] + draw.uniform(0, reach)
                )
                self._run(chosen)
            if not self.ready:
                self.best = min(self.best, max(self.free))
        if len(self.graph.duration) <= SMALL:
            self._reset()
            self.steps = steps
            self._search()
        return self.best

    def _reset(self) -> None:
        self.free, self.kept = [0.0] * self.pp, [0] * self.pp
        self.waits = dict.fromkeys(self.graph.duration, 0)
        for others in self.graph.after.values():
            for other, _ in others:
                self.waits[other] += 1
        self.ready = {node: 0.0 for node, count in self.waits.items() if not count}
        self.arrival = dict.fromkeys(self.graph.duration, 0.0)

    def _choices(self) -> list[Node]:
        graph, begins = self.graph, {}
        for node, arrival in self.ready.items():
            rank = graph.rank[node]
            if node[0] != "F" or self.kept[rank] + graph.room[node] < graph.limit:
                begins[node] = max(arrival, self.free[rank])
        if not begins:
            return []
        first = min(begins, key=lambda node: (begins[node] + graph.duration[node], node))
        end = begins[first] + graph.duration[first]
        rank = graph.rank[first]
        return sorted(node for node, begin in begins.items() if graph.rank[node] == rank and begin < end)

    def _run(self, node: Node) -> None:
        graph, rank = self.graph, self.graph.rank[node]
        end = max(self.ready.pop(node), self.free[rank]) + graph.duration[node]
        self.free[rank] = end
        self.kept[rank] += (node[0] == "F") - (node[0] == "W")
        for other, lag in graph.after[node]:
            self.arrival[other] = max(self.arrival[other], end + lag)
            self.waits[other] -= 1
            if not self.waits[other]:
                self.ready[other] = self.arrival[other]

    def _search(self) -> None:
        """Follow every choice, those first that most must follow."""
        graph = self.graph
        if not self.ready:
            self.best = min(self.best, max(self.free))
            return
        ends = (max(at, self.free[graph.rank[n]]) + graph.duration[n] + graph.tail[n] for n, at in self.ready.items())
        if max(ends) >= self.best * (1 - 1e-9) or self.steps <= 0:
            return
        for node in sorted(self._choices(), key=lambda node: -graph.tail[node] - graph.duration[node]):
            self.steps -= 1
            kept = [*self.free], [*self.kept], {**self.waits}, {**self.ready}, {**self.arrival}
            self._run(node)
            self._search()
            self.free, self.kept, self.waits, self.ready, self.arrival = kept
