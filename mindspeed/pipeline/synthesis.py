"""Schedules from closed forms. Light, no torch."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import Literal

from mindspeed.pipeline.operations import Op, PipelineShape, Schedule
from mindspeed.pipeline.recomputation import recompute_all, recompute_least


def megatron(shape: PipelineShape) -> Schedule:
    """Return Megatron's own order: 1F1B with one chunk a rank, else interleaved 1F1B."""
    name = "1f1b" if shape.vpp == 1 else "interleaved"
    return Schedule(name, shape, tuple(tuple(_one_forward_one_backward(shape, rank)) for rank in range(shape.pp)))


def paired(shape: PipelineShape) -> Schedule:
    """Return Megatron's order with one more forward pass ahead, so that each other one runs together with a backward pass."""
    ops = tuple(tuple(_one_forward_one_backward(shape, rank, more=1)) for rank in range(shape.pp))
    return Schedule("paired", shape, ops, paired=True)


def _one_forward_one_backward(shape: PipelineShape, rank: int, more: int = 0) -> Iterator[Op]:
    """Yield the operations of a rank, with ``more`` forward passes ahead of the first backward pass."""
    group = shape.group or shape.pp
    turns = [
        (chunk, micro_batch)
        for begin in range(0, shape.micro_batches, group)
        for chunk in range(shape.vpp)
        for micro_batch in range(begin, min(begin + group, shape.micro_batches))
    ]
    ahead = shape.pp - rank - 1
    warmup = min(len(turns), more + (ahead if shape.vpp == 1 else 2 * ahead + (shape.vpp - 1) * group))
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


def zero_bubble_h1(shape: PipelineShape) -> Schedule:
    """Return Megatron's order with the weight gradients of rank r that many chunk-steps behind: ZB-H1 (arXiv 2401.10241).

    Where F = B = W, its bubble is the floor with the activations of Megatron's order.
    """
    return delayed(megatron(shape), range(shape.pp))


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


Recomputation = Literal["none", "all", "least"]
"""Activation sets to recompute: none, every one ahead of its gradient, or as few as a limit allows."""


def recomputed(base: Schedule, recompute: Recomputation, limit: int | None = None) -> Schedule:
    """Return a schedule with the R that it needs. Raises ValueError for a limit that it cannot keep."""
    if recompute == "all":
        return recompute_all(base)
    if recompute == "least":
        return recompute_least(base, base.shape.stages if limit is None else limit)
    return base
