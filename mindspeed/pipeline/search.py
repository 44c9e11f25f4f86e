"""Schedules by name, and a search for the fastest one. Light, no torch."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final, NamedTuple

from mindspeed.pipeline.bounds import PASSES, Times, lower_bound, shortest_period, tails
from mindspeed.pipeline.list_scheduling import NEVER, ListScheduler, RankLimits, begins, scheduled
from mindspeed.pipeline.operations import Costs, PipelineShape, Placement, Schedule
from mindspeed.pipeline.recomputation import LimitTooSmallError
from mindspeed.pipeline.simulator import SimulationResult, judge, peak_sets, simulate
from mindspeed.pipeline.synthesis import Recomputation, megatron, paired, recomputed, zero_bubble_h1, zero_bubble_v
from mindspeed.process.gc_pause import collector_paused

NAMES: Final[dict[str, Placement]] = {
    "1f1b": "loop",
    "interleaved": "loop",
    "zb-h1": "loop",
    "fastest": "loop",
    "paired": "loop",
    "zb-v": "v",
}
"""Schedules that need no feature, and their placement."""


def named(
    name: str, shape: PipelineShape, costs: Costs, recompute: Recomputation = "none", limit: int | None = None
) -> Schedule:
    """Return a schedule of `NAMES`. Raises ValueError for a number of chunks or a limit that it does not have."""
    if (name == "1f1b" and shape.vpp > 1) or (name == "interleaved" and shape.vpp == 1):
        raise ValueError(
            f"{name} needs {'one chunk' if name == '1f1b' else 'two chunks or more'} per rank, but vpp is {shape.vpp}"
        )
    if name == "fastest":
        return fastest(shape, costs, recompute, limit)[0]
    if name == "paired":
        return recomputed(paired(shape), recompute, limit)
    base = zero_bubble_v(shape) if name == "zb-v" else megatron(shape)
    return recomputed(zero_bubble_h1(shape) if name == "zb-h1" else base, recompute, limit)


OPERATIONS: Final = 200_000
"""Operations in all timetables that a search makes; not a time, so that all ranks find the same schedule."""
TIMETABLES: Final = (40, 1000)
"""Least and greatest number of these timetables."""
MEMORY: Final = (1.0, 1.25, 1.5, 2.0, math.inf)
"""Activation sets that are tried below the limit, as factors of those of Megatron's schedule."""
AHEAD: Final = (math.inf, 1.5, 1.25, 1.0)
"""Micro-batches between forward and backward of a stage that are tried, as factors of the stages from it to the last one."""
GAIN: Final = 1e-3
"""Share by which a schedule must be shorter to keep more activation sets."""
ROUNDING: Final = 1e-9
"""Share by which equal times differ."""


def least_kept(shape: PipelineShape) -> int:
    """Return the fewest activation sets that every rank can be held to without recomputation.

    In a loop, forwards keep Megatron's order: those of a group on all chunks but the last come before its first backward.
    """
    if shape.placement == "v":
        return shape.vpp
    return (shape.vpp - 1) * min(shape.group or shape.pp, shape.micro_batches) + 1


@functools.lru_cache(maxsize=64)
@collector_paused()
def fastest(
    shape: PipelineShape, costs: Costs, recompute: Recomputation = "none", limit: int | None = None, repeated: bool = False
) -> tuple[Schedule, SimulationResult]:
    """Return the shortest schedule that is found, and its verdict; equal on all ranks.

    ``limit`` bounds the activation sets of every rank. The search ends at the lower bound. With ``repeated`` the longest time
    of a rank between its own first and last operation counts, which is the period of steps that overlap.
    Raises LimitTooSmallError where no schedule keeps the limit.
    """
    least = least_kept(shape) if recompute == "none" else 1
    if limit is not None and limit < least:
        raise LimitTooSmallError(limit, least)
    limited = shape.stages if limit is None and recompute == "least" else limit
    schedule = _Search(shape, costs, recompute, limited, repeated).run()
    return schedule, judge(schedule, costs, limit)


class _Found(NamedTuple):
    """Schedule and its length: the makespan, or the longest span of a rank."""

    length: float
    peak: int
    begin: Times
    schedule: Callable[[], Schedule]


class _Search:
    """Closed forms, then list scheduling by rules, then by keys drawn near a rule or near the begins of the best schedule.

    With placement loop, each rank runs its forwards in Megatron's order, so that they draw the same random numbers.
    """

    def __init__(self, shape: PipelineShape, costs: Costs, recompute: Recomputation, limit: int | None, repeated: bool) -> None:
        self.shape, self.costs, self.recompute, self.limit, self.repeated = shape, costs, recompute, limit, repeated
        loop = shape.placement == "loop"
        self.closed = (megatron(shape), zero_bubble_h1(shape)) if loop else (zero_bubble_v(shape),)
        forwards = tuple(op.chunk for op in self.closed[0].ops[0] if op.kind == "F") if loop and shape.vpp > 1 else None
        self.planned = costs.with_recompute_in_backward() if recompute == "all" else costs
        self.scheduler = ListScheduler(shape, self.planned, forwards)
        self.all_sets = shape.vpp * shape.micro_batches
        again = (shape.micro_batches * (recompute == "all"),) * shape.stages
        self.bound = lower_bound(shape, costs, limit if recompute == "none" else None, again)
        if repeated:
            self.bound = shortest_period(shape, costs, again)
        self.best = _Found(math.inf, 0, [], lambda: self.closed[0])

    def run(self) -> Schedule:
        for schedule in reversed(self.closed):
            if not self._is_done():
                self._try(schedule, ROUNDING)
        least, most = TIMETABLES
        count = max(least, min(most, OPERATIONS // (len(PASSES) * self.shape.stages * self.shape.micro_batches)))
        for keys, limits, patience in itertools.islice(self._keys(), count):
            if self._is_done():
                break
            timetable = self.scheduler.run(keys, limits, patience)
            make = partial(scheduled, timetable, self.shape)
            if self.recompute == "none":
                length = timetable.span if self.repeated else timetable.makespan
                self._take(_Found(length, timetable.peak, timetable.begin, make), GAIN)
            else:
                self._try(make(), GAIN)
        return self.best.schedule()

    def _is_done(self) -> bool:
        return self.best.length <= self.bound * (1 + ROUNDING)

    def _try(self, base: Schedule, gain: float) -> None:
        """Judge a schedule with the R that it needs, if it keeps the limit."""
        try:
            schedule = recomputed(base, self.recompute, self.limit)
        except LimitTooSmallError:
            return
        spans, _ = simulate(schedule, self.costs)
        peak = max(map(peak_sets, schedule.ops))
        if self.limit is None or peak <= self.limit:
            length = max(rank[-1].end - (rank[0].begin if self.repeated else 0.0) for rank in spans)
            self._take(_Found(length, peak, begins(self.shape, spans), lambda: schedule), gain)

    def _take(self, found: _Found, gain: float) -> None:
        """Keep what is no longer than the best, or shorter by ``gain`` if it keeps more activation sets."""
        best = self.best
        as_small = found.peak <= best.peak and found.length <= best.length * (1 + ROUNDING)
        if as_small or found.length < best.length * (1 - gain):
            self.best = found

    def _keys(self) -> Iterator[tuple[Times, RankLimits, float]]:
        """Yield the keys, limits and patience of list scheduling. With recomputation, whose R are placed later, rules only."""
        shape = self.shape
        waiting = self.all_sets if self.limit is None else self.limit
        by_tail = [
            [[-rest - duration for rest in row] for row, duration in zip(rows, durations, strict=True)]
            for rows, durations in zip(tails(shape, self.planned), self.scheduler.durations, strict=True)
        ]
        yield from self._rules(waiting, by_tail)
        draw = random.Random(0)
        mean = sum(map(sum, self.scheduler.durations)) / (len(PASSES) * shape.stages)
        ahead = (shape.micro_batches,) * shape.stages
        while self.recompute == "none":
            base, patience = draw.choice(((self.best.begin, NEVER), (self.best.begin, 0.5), (by_tail, 0.0), (by_tail, 1.0)))
            reach, share = mean * draw.choice((0.3, 1.0, 3.0)), draw.choice((1.0, 0.3, 0.1))
            keys = [
                [[at + draw.uniform(-reach, reach) if draw.random() < share else at for at in row] for row in kind]
                for kind in base
            ]
            yield keys, RankLimits(draw.choice((self.best.peak, waiting)), waiting, ahead), patience

    def _rules(self, waiting: int, by_tail: Times) -> Iterator[tuple[Times, RankLimits, float]]:
        """Yield two rules within several limits: B before F before W, and the operation first that most must follow.

        In a loop, a group of forwards on each chunk but the last precedes its first backward, whatever the limit.
        """
        shape = self.shape
        own = max(map(peak_sets, self.closed[0].ops))
        most = waiting if self.recompute == "none" else self.all_sets
        memory = sorted({math.ceil(min(most, own * factor)) for factor in MEMORY})
        by_kind = [
            [[float(kind * shape.stages + sign * stage)] * shape.micro_batches for stage in range(shape.stages)]
            for kind, sign in ((1, -1), (0, -1), (2, 1))
        ]
        for patience, kept, factor, keys in itertools.product((0.0, 0.5), memory, AHEAD, (by_kind, by_tail)):
            ahead = [factor * (shape.stages - stage) for stage in range(shape.stages)]
            if shape.placement == "loop":
                ahead[: -shape.pp] = [max(count, shape.group or shape.pp) for count in ahead[: -shape.pp]]
            yield keys, RankLimits(kept, waiting, tuple(math.ceil(min(shape.micro_batches, each)) for each in ahead)), patience
