"""List scheduling of a pipeline: each rank runs the ready operation with the least key. Light, no torch."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mindspeed.pipeline.bounds import PASSES, Times, durations, hops
from mindspeed.pipeline.operations import Costs, Op, PipelineShape, Schedule
from mindspeed.pipeline.simulator import Span

F, B, W = range(len(PASSES))
NEVER = float("inf")


class RankLimits(NamedTuple):
    """Bounds of a rank: activation sets from F to W, sets from B to W, and for each stage micro-batches from F to B."""

    kept: int
    waiting: int
    ahead: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Timetable:
    """Begin of every operation, the operations of each rank as (kind, stage, micro-batch), and the sets that a rank keeps.

    ``span`` is the longest time of a rank between its own first and last operation.
    """

    makespan: float
    span: float
    begin: Times
    order: list[list[tuple[int, int, int]]]
    peak: int


class ListScheduler:
    """Makes timetables of one shape and costs.

    Micro-batches of a stage come in ascending order, as Megatron sums them. ``forwards`` is the order of chunks in which every
    rank runs its forwards; None lets the keys decide.
    """

    def __init__(self, shape: PipelineShape, costs: Costs, forwards: tuple[int, ...] | None = None) -> None:
        self.shape = shape
        self.durations, self._hop = durations(shape, costs), hops(shape, costs)
        self._rank = [shape.rank_of(stage) for stage in range(shape.stages)]
        self._stages = [[shape.stage_of(rank, chunk) for chunk in range(shape.vpp)] for rank in range(shape.pp)]
        self._forwards = forwards and [[*(stages[chunk] for chunk in forwards), -1] for stages in self._stages]
        self._chunk = {stage: chunk for stages in self._stages for chunk, stage in enumerate(stages)}

    def run(self, keys: Times, limits: RankLimits, patience: float = 0.0) -> Timetable:
        """Run every rank as its operations become ready.

        An operation with a greater key is not begun if one with a smaller key is known to come before the share ``patience`` of
        its duration is over. With the patience `NEVER` a key is also the earliest begin of its operation. Without ``forwards``,
        a rank keeps room for the later chunks of its micro-batches, so that it never stops for ever. Raises ValueError for
        limits with which the ranks stop before all operations have run.
        """
        shape = self.shape
        self._keys, self._limits, self._patience = keys, limits, patience
        free = self._forwards is None
        self._room = [limits.kept - (shape.vpp - 1 - self._chunk[stage] if free else 0) for stage in range(shape.stages)]
        self._arrived: tuple[list[list[float]], ...] = tuple([[] for _ in self._rank] for _ in PASSES)
        self._arrived[F][0] = [0.0] * shape.micro_batches
        self._begin: Times = [[[] for _ in self._rank] for _ in PASSES]
        self._free = [0.0] * shape.pp
        self._kept, self._waiting, self._turn = ([0] * shape.pp for _ in range(3))
        order: list[list[tuple[int, int, int]]] = [[] for _ in range(shape.pp)]
        peak = 0
        events = [(0.0, rank) for rank in range(shape.pp)]
        while events:
            now, rank = heapq.heappop(events)
            if now < self._free[rank]:
                continue
            chosen, wake = self._choose(rank, now)
            if chosen is None:
                if wake < NEVER:
                    heapq.heappush(events, (wake, rank))
                continue
            kind, stage = chosen
            order[rank].append((kind, stage, len(self._begin[kind][stage])))
            arrival, target = self._start(kind, stage, rank, now)
            heapq.heappush(events, (self._free[rank], rank))
            peak = max(peak, self._kept[rank])
            if target != rank and self._free[target] <= now:
                heapq.heappush(events, (arrival, target))
        if (done := sum(map(len, order))) < (total := len(PASSES) * shape.stages * shape.micro_batches):
            raise ValueError(f"ranks stop after {done} of {total} operations, because none is within {limits}")
        first = [min(self._begin[F][stage][0] for stage in stages) for stages in self._stages]
        span = max(end - begin for begin, end in zip(first, self._free, strict=True))
        return Timetable(max(self._free), span, self._begin, order, peak)

    def _choose(self, rank: int, now: float) -> tuple[tuple[int, int] | None, float]:
        """Return the kind and stage to run now, or None and the time at which something may have changed."""
        keys, arrived, begin = self._keys, self._arrived, self._begin
        best, chosen = NEVER, None
        next_forward = self._forwards and self._forwards[rank][self._turn[rank]]
        coming: list[tuple[float, float]] = []
        for stage in self._stages[rank]:
            backwards, weights = len(begin[B][stage]), len(begin[W][stage])
            if weights < backwards and keys[W][stage][weights] < best:
                best, chosen = keys[W][stage][weights], (W, stage)
            if backwards < len(arrived[B][stage]) and self._waiting[rank] < self._limits.waiting:
                at, key = arrived[B][stage][backwards], keys[B][stage][backwards]
                if at > now:
                    coming.append((at, key))
                elif key < best:
                    best, chosen = key, (B, stage)
            forwards = len(begin[F][stage])
            if (
                forwards < len(arrived[F][stage])
                and self._kept[rank] < self._room[stage]
                and forwards - backwards < self._limits.ahead[stage]
                and next_forward in (None, stage)
            ):
                at, key = arrived[F][stage][forwards], keys[F][stage][forwards]
                if at > now:
                    coming.append((at, key))
                elif key < best:
                    best, chosen = key, (F, stage)
        if chosen is None:
            return None, min(coming)[0] if coming else NEVER
        if self._patience == NEVER and best > now:
            return None, min([best, *(at for at, _ in coming)])
        if coming and self._patience:
            until = now + self._patience * self.durations[chosen[0]][chosen[1]] * (1 - 1e-9)
            soon = [at for at, key in coming if key < best and at < until]
            if soon:
                return None, min(soon)
        return chosen, NEVER

    def _start(self, kind: int, stage: int, rank: int, now: float) -> tuple[float, int]:
        """Begin an operation; return when its message arrives, and at which rank."""
        end = now + self.durations[kind][stage]
        self._begin[kind][stage].append(now)
        self._free[rank] = end
        self._kept[rank] += (kind == F) - (kind == W)
        self._waiting[rank] += (kind == B) - (kind == W)
        if kind == F:
            self._turn[rank] += 1
            if stage + 1 == self.shape.stages:
                self._arrived[B][stage].append(end)
                return end, rank
            next_stage, arrival = stage + 1, end + self._hop[stage]
        elif kind == B and stage:
            next_stage, arrival = stage - 1, end + self._hop[stage - 1]
        else:
            return end, rank
        self._arrived[kind][next_stage].append(arrival)
        return arrival, self._rank[next_stage]


def scheduled(timetable: Timetable, shape: PipelineShape) -> Schedule:
    """Return the schedule of a timetable."""
    chunk_of = {shape.stage_of(rank, chunk): chunk for rank in range(shape.pp) for chunk in range(shape.vpp)}
    ops = tuple(
        tuple(Op(PASSES[kind], chunk_of[stage], micro_batch) for kind, stage, micro_batch in rank) for rank in timetable.order
    )
    return Schedule(f"list schedule, at most {timetable.peak} sets", shape, ops)


def begins(shape: PipelineShape, spans: Sequence[Sequence[Span]]) -> Times:
    """Return the begin of each F, B and W of a simulation; D is both of the latter."""
    begin = [[[0.0] * shape.micro_batches for _ in range(shape.stages)] for _ in PASSES]
    for rank, done in enumerate(spans):
        for (kind, chunk, micro_batch), start, _ in done:
            for part in "BW" if kind == "D" else kind.replace("R", ""):
                begin[PASSES.index(part)][shape.stage_of(rank, chunk)][micro_batch] = start
    return begin
