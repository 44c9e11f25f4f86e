"""Schedules from closed forms. Light, no torch."""

from __future__ import annotations

import itertools
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
    """Return Megatron's order with one more forward pass ahead, so that each other one runs together with a backward pass.

    Of as few micro-batches as stages none can run ahead: Megatron's order is returned, as for an evaluation.
    """
    if shape.vpp > 1 and shape.micro_batches <= (shape.group or shape.pp):
        return megatron(shape)
    ops = tuple(tuple(_one_forward_one_backward(shape, rank, more=1)) for rank in range(shape.pp))
    return Schedule("paired", shape, ops, tuple(frozenset(_places_before_backward(rank)) for rank in ops))


def _places_before_backward(ops: Sequence[Op]) -> Iterator[int]:
    """Yield the places of forward passes with a backward pass of another micro-batch or chunk behind them."""
    for place, (op, following) in enumerate(itertools.pairwise(ops)):
        if op.kind == "F" and following.kind in "BD" and following[1:] != op[1:]:
            yield place


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


def dual_pipe_v(shape: PipelineShape, split: bool) -> Schedule:
    """Return DualPipeV: DualPipe of DeepSeek-V3 (arXiv 2412.19437) cut in half, on stages that are placed as a V.

    In the steady phase the forward pass of each chunk runs together with a backward pass of the other one. With ``split``, W of
    the warm-up and cool-down phases is apart. Fewer than 2 pp - 1 micro-batches, as of an evaluation, have no steady phase and
    get the order of ZB-V.
    """
    if shape.micro_batches < 2 * shape.pp - 1:
        base = zero_bubble_v(shape)
        joined = tuple(
            tuple(op._replace(kind="D") if op.kind == "B" else op for op in ops if op.kind != "W") for ops in base.ops
        )
        return base if split else Schedule(base.name, shape, joined)
    words = [list(_dual_pipe_v(shape, rank, split)) for rank in range(shape.pp)]
    pairs = tuple(frozenset(place for place, word in enumerate(rank) if word.endswith("&")) for rank in words)
    return Schedule("DualPipeV", shape, tuple(tuple(_numbered(rank)) for rank in words), pairs)


def _dual_pipe_v(shape: PipelineShape, rank: int, split: bool) -> Iterator[str]:
    """Yield the operations of a rank as words: kind and chunk, and an & where it runs together with the next one."""
    rest, steady = shape.pp - rank - 1, shape.micro_batches - 2 * shape.pp + rank + 1
    apart, waiting = ("B" if split else "D"), deque[str]()
    yield from ["F0"] * (2 * rest) + ["F0", "F1"] * (rank + 1)
    yield from [f"{apart}1", *(["W1"] if split else []), "F1"] * rest
    for turn in range(steady):
        yield from ["F0", "D1"] if turn == 0 and rest == 0 else ["F0&", "D1"]
        yield from ["F1&", "D0"]
    yield from ["D1", "F1&", "D0"] * rest
    backwards = [f"D{chunk}" for _ in range(rank + 1) for chunk in (1, 0)]
    for place, word in enumerate(backwards):
        if split and place > rank:
            waiting.append(f"W{word[1]}")
            yield f"B{word[1]}"
        else:
            yield word
    for _ in range(rest):
        if split:
            yield waiting.popleft()
            waiting.append("W0")
        yield f"{apart}0"
    yield from waiting


def _numbered(words: Sequence[str]) -> Iterator[Op]:
    """Yield operations whose micro-batches ascend: of F, of B and D together, and of W as those of B."""
    count: Counter[str] = Counter()
    waiting: dict[str, deque[int]] = {"0": deque(), "1": deque()}
    for word in words:
        kind, chunk = word[0], word[1]
        of = "F" if kind == "F" else "B"
        if kind == "W":
            micro_batch = waiting[chunk].popleft()
        else:
            micro_batch = count[of + chunk]
            count[of + chunk] += 1
        if kind == "B":
            waiting[chunk].append(micro_batch)
        yield Op(kind, int(chunk), micro_batch)  # type: ignore[arg-type]


Recomputation = Literal["none", "all", "least"]
"""Activation sets to recompute: none, every one ahead of its gradient, or as few as a limit allows."""


def recomputed(base: Schedule, recompute: Recomputation, limit: int | None = None) -> Schedule:
    """Return a schedule with the R that it needs. Raises ValueError for a limit that it cannot keep."""
    if recompute == "all":
        return recompute_all(base)
    if recompute == "least":
        return recompute_least(base, base.shape.stages if limit is None else limit)
    return base
