"""Schedules from closed forms, and a search over a few of them that the simulator judges. Light, no torch."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import Final, Literal

from mindspeed.pipeline.operations import Costs, Op, PipelineShape, Placement, Schedule
from mindspeed.pipeline.recomputation import LimitTooSmallError, recompute_all, recompute_least
from mindspeed.pipeline.simulator import SimulationResult, judge

LAGS: Final = tuple(step / 4 for step in (4, 0, 1, 2, 3, 5, 6, 7, 8))
"""Factors of the rank that a search tries as the lag of weight gradients; 1 comes first, the best where F = B = W."""


def megatron(shape: PipelineShape) -> Schedule:
    """Return Megatron's own order: 1F1B with one chunk a rank, else interleaved 1F1B."""
    name = "1f1b" if shape.vpp == 1 else "interleaved"
    return Schedule(name, shape, tuple(tuple(_one_forward_one_backward(shape, rank)) for rank in range(shape.pp)))


def _one_forward_one_backward(shape: PipelineShape, rank: int) -> Iterator[Op]:
    group = shape.group or shape.pp
    turns = [
        (chunk, micro_batch)
        for begin in range(0, shape.micro_batches, group)
        for chunk in range(shape.vpp)
        for micro_batch in range(begin, min(begin + group, shape.micro_batches))
    ]
    ahead = shape.pp - rank - 1
    warmup = min(len(turns), ahead if shape.vpp == 1 else 2 * ahead + (shape.vpp - 1) * group)
    forwards = (Op("F", *turn) for turn in turns)
    backwards = (Op("D", shape.vpp - 1 - chunk, micro_batch) for chunk, micro_batch in turns)
    for _ in range(warmup):
        yield next(forwards)
    for forward in forwards:
        yield forward
        yield next(backwards)
    yield from backwards


def delayed(base: Schedule, lag: Sequence[int]) -> Schedule:
    """Split each D in B and W; W follows first-in first-out, ``lag[rank]`` chunk-steps behind B."""
    ops = tuple(tuple(_delayed(rank, steps)) for rank, steps in zip(base.ops, lag, strict=True))
    return Schedule(f"{base.name}, W behind", base.shape, ops)


def _delayed(ops: Sequence[Op], lag: int) -> Iterator[Op]:
    due: deque[Op] = deque()
    for op in ops:
        if op.kind != "D":
            yield op
            continue
        yield op._replace(kind="B")
        due.append(op._replace(kind="W"))
        if len(due) > lag:
            yield due.popleft()
    yield from due


def lag_by_rank(factor: float, pp: int) -> tuple[int, ...]:
    """Return the lag of each rank: the factor times its number, rounded up."""
    return tuple(math.ceil(factor * rank) for rank in range(pp))


def zero_bubble_v(shape: PipelineShape) -> Schedule:
    """Return the V schedule of Qi et al., "Pipeline Parallelism with Controllable Memory" (arXiv 2405.15362), ZB-V.

    It has the activations of 1F1B, and its bubble is the floor where F = B = W and there are at least 2 pp - 1 micro-batches.
    """
    return Schedule("zb-v", shape, tuple(tuple(_zero_bubble_v(shape, rank)) for rank in range(shape.pp)))


def _zero_bubble_v(shape: PipelineShape, rank: int) -> Iterator[Op]:
    """Yield the phases of a rank, made as words: kind and chunk, such as F0. Of fewer micro-batches the others are left out."""
    pp = shape.pp
    total = max(shape.micro_batches, 2 * pp - 1)
    rest = pp - rank
    words = ["F0"] * (2 * rest - 1) + ["F1", "F0"] * rank + ["F1", "B1", "W1"] * rest
    ahead = total - words.count("F0")  # forwards of chunk 0 that are left when both chunks alternate
    for turn in range(total - pp):
        words += ["F0"] * (turn < ahead) + ["B0", "W0", "F1", "B1", "W1"]
    words += ["B0", "B1"] * rank + ["B0", "W0"] * rest
    done = Counter(words)
    words += ["W1"] * (total - done["W1"]) + ["W0"] * (total - done["W0"])
    count: Counter[str] = Counter()
    for word in words:
        micro_batch = count[word]
        count[word] += 1
        if micro_batch < shape.micro_batches:
            yield Op(word[0], int(word[1]), micro_batch)  # type: ignore[arg-type]


NAMES: Final[dict[str, Placement]] = {
    "1f1b": "loop",
    "interleaved": "loop",
    "zb-h1": "loop",
    "fastest": "loop",
    "zb-v": "v",
}
"""Schedules that need no feature, and their placement."""


def named(name: str, shape: PipelineShape, costs: Costs) -> Schedule:
    """Return a schedule of `NAMES`. Raises ValueError for a number of chunks that it does not have."""
    if (name == "1f1b" and shape.vpp > 1) or (name == "interleaved" and shape.vpp == 1):
        raise ValueError(
            f"{name} needs {'one chunk' if name == '1f1b' else 'two chunks or more'} per rank, but vpp is {shape.vpp}"
        )
    if name == "zb-h1":
        return delayed(megatron(shape), range(shape.pp))
    if name == "zb-v":
        return zero_bubble_v(shape)
    return fastest(shape, costs)[0] if name == "fastest" else megatron(shape)


Recomputation = Literal["none", "all", "least"]
"""Activation sets to recompute: none, every one ahead of its gradient, or as few as a limit allows."""


def recomputed(base: Schedule, recompute: Recomputation, limit: int | None = None) -> Schedule:
    """Return a schedule with the R that it needs. Raises ValueError for a limit that it cannot keep."""
    if recompute == "all":
        return recompute_all(base)
    if recompute == "least":
        return recompute_least(base, base.shape.stages if limit is None else limit)
    return base


def fastest(
    shape: PipelineShape, costs: Costs, recompute: Recomputation = "none", limit: int | None = None
) -> tuple[Schedule, SimulationResult]:
    """Return the schedule with the least makespan of those with weight gradients behind, and its verdict.

    ``limit`` bounds the activation sets of every rank. The search ends at the floor.
    Raises LimitTooSmallError where no candidate keeps the limit.
    """
    candidates: Iterator[Schedule]
    if shape.placement == "v":
        candidates = iter([zero_bubble_v(shape)])
    else:
        base = megatron(shape)
        candidates = (delayed(base, lag_by_rank(factor, shape.pp)) for factor in LAGS)
    best: tuple[Schedule, SimulationResult] | None = None
    least: list[int] = []
    for candidate in candidates:
        try:
            schedule = recomputed(candidate, recompute, limit)
        except LimitTooSmallError as error:
            least.append(error.least)
            continue
        verdict = judge(schedule, costs)
        if limit is not None and max(verdict.peak) > limit:
            least.append(max(verdict.peak))
            continue
        if best is None or verdict.makespan < best[1].makespan:
            best = schedule, verdict
        if verdict.makespan <= verdict.floor * (1 + 1e-9):
            break
    if best is None:
        raise LimitTooSmallError(limit or 0, min(least))
    return best
