"""Simulation of a schedule: whether it is complete and can run, how long it lasts, and what it keeps. Light, no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from mindspeed.pipeline.bounds import lower_bound
from mindspeed.pipeline.messages import Message, needed
from mindspeed.pipeline.operations import Costs, Op, Schedule


class Span(NamedTuple):
    """Operation with the time of its begin and its end."""

    op: Op
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """Result of a simulation. With ``problems`` the schedule cannot run, and the numbers are those up to the stop.

    ``floor`` is a lower bound for all orders of the same operations on this placement, see `bounds.lower_bound`.
    ``bubble`` is the idle share of the makespan, ``span_bubble`` that of each rank between its own first and last operation,
    ``peak`` the activation sets (of one chunk and one micro-batch) that each rank keeps at most.
    """

    problems: tuple[str, ...]
    spans: tuple[tuple[Span, ...], ...]
    makespan: float
    floor: float
    bubble: float
    span_bubble: tuple[float, ...]
    peak: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "makespan": round(self.makespan, 9),
            "floor": round(self.floor, 9),
            "bubble": round(self.bubble, 9),
            "span_bubble": [round(share, 9) for share in self.span_bubble],
            "peak": list(self.peak),
        }


def judge(schedule: Schedule, costs: Costs | None = None, limit: int | None = None) -> SimulationResult:
    """Run a schedule by its dependencies and return what came of it. ``limit`` is the one of `bounds.lower_bound`."""
    costs = costs or Costs()
    problems = tuple(incomplete(schedule))
    spans: tuple[tuple[Span, ...], ...] = tuple(() for _ in schedule.ops)
    if not problems:
        spans, problems = simulate(schedule, costs)
    stage_of, cost = schedule.shape.stage_of, costs.of
    work = [sum(cost(op.kind, stage_of(rank, op.chunk)) for op, _, _ in done) for rank, done in enumerate(spans)]
    makespan = max((rank[-1].end for rank in spans if rank), default=0.0)
    idle = [1 - done / (rank[-1].end - rank[0].begin) if rank else 0.0 for done, rank in zip(work, spans, strict=True)]
    return SimulationResult(
        problems=problems,
        spans=spans,
        makespan=makespan,
        floor=lower_bound(schedule.shape, costs, limit, recomputations(schedule)),
        bubble=1 - sum(work) / (makespan * len(work)) if makespan else 0.0,
        span_bubble=tuple(idle),
        peak=tuple(peak_sets(rank) for rank in schedule.ops),
    )


def recomputations(schedule: Schedule) -> tuple[int, ...]:
    """Return the number of R of each stage."""
    shape = schedule.shape
    count = Counter(shape.stage_of(rank, op.chunk) for rank, ops in enumerate(schedule.ops) for op in ops if op.kind == "R")
    return tuple(count[stage] for stage in range(shape.stages))


COMPLETE: Final = ("FD", "FRD", "FBW", "FRBW")
"""Operations of a rank on one chunk and one micro-batch, in order."""


def incomplete(schedule: Schedule) -> Iterator[str]:
    """Yield a sentence for each chunk and micro-batch whose operations on a rank are not one of `COMPLETE`."""
    shape = schedule.shape
    if len(schedule.ops) != shape.pp:
        yield f"the schedule has lists for {len(schedule.ops)} ranks, but the pipeline has {shape.pp}"
        return
    for rank, ops in enumerate(schedule.ops):
        done = {(chunk, micro_batch): "" for chunk in range(shape.vpp) for micro_batch in range(shape.micro_batches)}
        for kind, chunk, micro_batch in ops:
            done[chunk, micro_batch] = done.get((chunk, micro_batch), "?") + kind
        for (chunk, micro_batch), kinds in done.items():
            name = f"rank {rank}, chunk {chunk}, micro-batch {micro_batch}"
            if kinds.startswith("?"):
                yield (
                    f"{name}: {kinds[1:]} is listed, but there are only {shape.vpp} chunks and {shape.micro_batches} "
                    "micro-batches"
                )
            elif kinds not in COMPLETE:
                yield f"{name}: the order is {kinds or 'empty'}, but must be {', '.join(COMPLETE[:-1])} or {COMPLETE[-1]}"


def out_of_order(schedule: Schedule) -> Iterator[str]:
    """Yield a sentence for each gradient whose micro-batches are summed in an order different from Megatron's.

    In Megatron's own schedules the backwards, and so the weight gradients, of a chunk run by ascending micro-batch.
    """
    for rank, ops in enumerate(schedule.ops):
        latest: dict[tuple[str, int], int] = {}
        for op in ops:
            for part in {"D": "BW", "B": "B", "W": "W"}.get(op.kind, ""):
                before = latest.get((part, op.chunk), -1)
                if op.micro_batch < before:
                    yield f"rank {rank}: {part} of chunk {op.chunk} has micro-batch {op.micro_batch} after {before}"
                latest[part, op.chunk] = op.micro_batch


def peak_sets(ops: tuple[Op, ...]) -> int:
    """Return the most activation sets that a rank keeps: from F, or R where the set is recomputed, to W or D."""
    recomputed = {op[1:] for op in ops if op.kind == "R"}
    kept = peak = 0
    for op in ops:
        if op.kind == "R" or (op.kind == "F" and op[1:] not in recomputed):
            kept += 1
            peak = max(peak, kept)
        elif op.kind in "WD":
            kept -= 1
    return peak


STEPS: Final = 4
"""Steps after which repeated steps are taken to have their period."""


def period(schedule: Schedule, costs: Costs) -> float:
    """Return the time of a step where no rank waits for others between two steps.

    No rank waits for the validation of a step: the first backward pass of a step follows the first forward pass on every stage,
    and so the end of the step before on every rank.
    """
    shape = replace(schedule.shape, micro_batches=schedule.shape.micro_batches * STEPS)
    ops, pairs = [], []
    for rank, once in enumerate(schedule.ops):
        later = [step * schedule.shape.micro_batches for step in range(STEPS)]
        ops.append(tuple(op._replace(micro_batch=op.micro_batch + offset) for offset in later for op in once))
        if schedule.pairs:
            pairs.append(frozenset(step * len(once) + place for step in range(STEPS) for place in schedule.pairs[rank]))
    spans, _ = simulate(Schedule(schedule.name, shape, tuple(ops), tuple(pairs)), costs)
    before, last = (max(rank[(step * len(rank)) // STEPS - 1].end for rank in spans) for step in (STEPS - 1, STEPS))
    return last - before


def simulate(schedule: Schedule, costs: Costs) -> tuple[tuple[tuple[Span, ...], ...], tuple[str, ...]]:
    """Return the spans of each rank of a complete schedule, and a sentence for each rank that waits for ever.

    Every rank runs until it waits; the end of an operation wakes the rank that waits for it.
    """
    shape = schedule.shape
    stage_of = [[shape.stage_of(rank, chunk) for chunk in range(shape.vpp)] for rank in range(shape.pp)]
    rank_of = [shape.rank_of(stage) for stage in range(shape.stages)]
    duration = {kind: [costs.of(kind, stage) for stage in range(shape.stages)] for kind in ("F", "B", "W", "D", "R")}
    ended: dict[Message, float] = {}
    waiting: dict[Message, int] = {}
    spans: list[list[Span]] = [[] for _ in schedule.ops]
    ready = list(range(shape.pp))
    while ready:
        rank = ready.pop()
        done = spans[rank]
        now = done[-1].end if done else 0.0
        while len(done) < len(schedule.ops[rank]):
            together = schedule.together(rank, len(done))
            stages = [stage_of[rank][op.chunk] for op in together]
            messages = [needed(op, stage, shape.stages) for op, stage in zip(together, stages, strict=True)]
            missing = [message for message in messages if message is not None and message not in ended]
            if missing:
                waiting[missing[0]] = rank
                break
            for message in messages:
                if message is not None:
                    now = max(now, ended[message] + (costs.hop if rank_of[message[1]] != rank else 0.0))
            end = now + sum(duration[op.kind][stage] for op, stage in zip(together, stages, strict=True))
            for op, stage in zip(together, stages, strict=True):
                done.append(Span(op, now, end))
                if op.kind in "FBD":
                    made = Message("F" if op.kind == "F" else "B", stage, op.micro_batch)
                    ended[made] = end
                    if made in waiting:
                        ready.append(waiting.pop(made))
            now = end
    problems = tuple(
        f"deadlock: rank {rank} waits at {schedule.ops[rank][len(spans[rank])]} for the "
        f"{'output' if message[0] == 'F' else 'gradient'} of stage {message[1]}, micro-batch {message[2]}, from rank "
        f"{rank_of[message[1]]}"
        for message, rank in sorted(waiting.items(), key=lambda item: item[1])
    )
    return tuple(tuple(rank) for rank in spans), problems
