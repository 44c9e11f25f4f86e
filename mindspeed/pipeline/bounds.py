"""Lower bound of the time of a pipeline step, proven without a schedule. Light, no torch."""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Iterable
from typing import Final

from mindspeed.pipeline.operations import Costs, Kind, PipelineShape

PASSES: Final[tuple[Kind, ...]] = ("F", "B", "W")
"""Operations of every stage and micro-batch, in order. An index of these is the kind of an operation here."""
Times = list[list[list[float]]]
"""A time for each kind of `PASSES`, stage and micro-batch."""


def durations(shape: PipelineShape, costs: Costs) -> list[list[float]]:
    """Return the duration of each kind of `PASSES` on each stage."""
    return [[costs.of(kind, stage) for stage in range(shape.stages)] for kind in PASSES]


def hops(shape: PipelineShape, costs: Costs) -> list[float]:
    """Return the duration of a message between each stage and the next one."""
    ranks = [shape.rank_of(stage) for stage in range(shape.stages)]
    return [costs.hop if sender != target else 0.0 for sender, target in itertools.pairwise(ranks)] + [0.0]


def heads(shape: PipelineShape, costs: Costs, limit: int | None = None) -> Times:
    """Return the earliest begin of the k-th F, B and W of each stage, in whatever order micro-batches come.

    They follow the k-th ones that they need and the (k - 1)-th of their kind. Under a limit of n activation sets, the k-th F of
    a stage also follows the (k - n)-th W.
    """
    stages, micro_batches = shape.stages, shape.micro_batches
    forward, backward, weight = durations(shape, costs)
    hop = hops(shape, costs)
    begin = [[[0.0] * micro_batches for _ in range(stages)] for _ in PASSES]
    f, b, w = begin
    for k in range(micro_batches):
        now = 0.0
        for stage in range(stages):
            if k:
                now = max(now, f[stage][k - 1] + forward[stage])
            if limit is not None and k >= limit:
                now = max(now, w[stage][k - limit] + weight[stage])
            f[stage][k] = now
            now += forward[stage] + hop[stage]
        for stage in reversed(range(stages)):
            now += hop[stage]
            if k:
                now = max(now, b[stage][k - 1] + backward[stage])
            b[stage][k] = now
            now += backward[stage]
            w[stage][k] = max(now, w[stage][k - 1] + weight[stage]) if k else now
    return begin


def tails(shape: PipelineShape, costs: Costs, limit: int | None = None) -> Times:
    """Return the least time that must follow the end of the k-th F, B and W of each stage, by the rules of `heads`."""
    stages, micro_batches = shape.stages, shape.micro_batches
    forward, backward, weight = durations(shape, costs)
    hop = hops(shape, costs)
    rest = [[[0.0] * micro_batches for _ in range(stages)] for _ in PASSES]
    f, b, w = rest
    for k in reversed(range(micro_batches)):
        later = k + 1 < micro_batches
        left = 0.0
        for stage in range(stages):
            if later:
                w[stage][k] = w[stage][k + 1] + weight[stage]
            if limit is not None and k + limit < micro_batches:
                w[stage][k] = max(w[stage][k], f[stage][k + limit] + forward[stage])
            left = max(left, w[stage][k] + weight[stage])
            if later:
                left = max(left, b[stage][k + 1] + backward[stage])
            b[stage][k] = left
            left += backward[stage] + hop[stage]
        for stage in reversed(range(stages)):
            left += hop[stage]
            if later:
                left = max(left, f[stage][k + 1] + forward[stage])
            f[stage][k] = left
            left += forward[stage]
    return rest


@functools.lru_cache(maxsize=64)
def lower_bound(shape: PipelineShape, costs: Costs, limit: int | None = None, recomputed: tuple[int, ...] = ()) -> float:
    """Return a time that no schedule of a shape is shorter than, be its forwards in any order.

    It is the longest of these, each for every rank: Jackson's preemptive schedule of the operations of the rank, which have
    their earliest begin and the time that must follow them (Carlier, "The one-machine sequencing problem"); and with a
    ``limit`` of activation sets per rank, the lives of all sets divided by the limit. ``recomputed`` has the number of R of
    each stage; a limit is not applied to a schedule with R.
    """
    limit = None if any(recomputed) else limit
    head, tail, duration = heads(shape, costs, limit), tails(shape, costs, limit), durations(shape, costs)
    forward, backward, weight = duration
    hop = hops(shape, costs)
    bound = 0.0
    for rank in range(shape.pp):
        stages = [shape.stage_of(rank, chunk) for chunk in range(shape.vpp)]
        jobs = [
            (begin, duration[kind][stage], rest)
            for kind in range(len(PASSES))
            for stage in stages
            for begin, rest in zip(head[kind][stage], tail[kind][stage], strict=True)
        ]
        for stage in stages:
            again = head[0][stage][0] + forward[stage], costs.of("R", stage), tail[1][stage][-1] + backward[stage]
            jobs += [again] * (recomputed[stage] if recomputed else 0)
        bound = max(bound, _one_machine(jobs))
        if limit is not None:
            lives = sum(sum(forward[at:]) + sum(backward[at:]) + 2 * sum(hop[at:]) + weight[at] for at in stages)
            bound = max(bound, head[0][stages[0]][0] + shape.micro_batches * lives / limit)
    return bound


def shortest_period(shape: PipelineShape, costs: Costs, recomputed: tuple[int, ...] = ()) -> float:
    """Return a time that no period of steps that overlap is shorter than, as each rank ends a step before it begins the next.

    It is the work of the rank that has most, or the span of the rank of the first stage: between its first forward pass and its
    last weight gradient, another stage runs all of its forward passes and input gradients.
    """
    kinds = [sum(costs.of(kind, stage) for kind in PASSES) * shape.micro_batches for stage in range(shape.stages)]
    again = [count * costs.of("R", stage) for stage, count in enumerate(recomputed)] or [0.0] * shape.stages
    ranks = [[shape.stage_of(rank, chunk) for chunk in range(shape.vpp)] for rank in range(shape.pp)]
    bound = max(sum(kinds[stage] + again[stage] for stage in stages) for stages in ranks)
    there_and_back = 0.0
    for stage, hop in enumerate(hops(shape, costs)):
        both = costs.of("F", stage) + costs.of("B", stage)
        bound = max(bound, there_and_back + shape.micro_batches * both + costs.of("W", 0))
        there_and_back += both + 2 * hop
    return bound


def _one_machine(jobs: Iterable[tuple[float, float, float]]) -> float:
    """Return the length of the preemptive schedule of jobs (earliest begin, duration, tail): the longest tail first."""
    waiting: list[tuple[float, float]] = []
    now = longest = 0.0
    for begin, duration, rest in [*sorted(jobs), (float("inf"), 0.0, 0.0)]:
        while waiting and now < begin:
            negative, left = heapq.heappop(waiting)
            if now + left > begin:
                heapq.heappush(waiting, (negative, now + left - begin))
                break
            now += left
            longest = max(longest, now - negative)
        now = max(now, begin)
        heapq.heappush(waiting, (-rest, duration))
    return longest
