"""Timelines of pipeline schedules, from the lists of operations that the engine runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from mindspeed.pipeline.drawing import lanes
from mindspeed.pipeline.messages import needed, produced
from mindspeed.pipeline.operations import Costs, Schedule
from mindspeed.pipeline.simulator import Span, judge
from tools.docs.drawing import Arrow, Box, Timeline

_COLOURS: Final = {"F": 0, "W": 1, "B": 2, "R": 4, "D": 5}
LEGEND: Final = (
    "F is a forward pass, B its input gradient, W its weight gradient, D both in one pass, and R a repeated forward pass. "
    "The number is the micro-batch; lower-case letters are the second model chunk of a rank. Every operation takes one step, "
    "D two. Arrows are messages of micro-batch 0, and dashed boxes are idle time."
)


def timeline(title: str, schedule: Schedule, recompute_in_backward: bool = False) -> Timeline:
    """Return what every rank does in each step of a schedule whose operations cost the same; two passes together alternate.

    With ``recompute_in_backward`` a D begins with a step of recomputation, as in Megatron's own schedules.
    """
    costs = Costs().with_recompute_in_backward() if recompute_in_backward else Costs()
    verdict = judge(schedule, costs)
    boxes = {}
    for rank, spans in enumerate(verdict.spans):
        for (op, begin, end), lane, together in lanes(spans):
            first = round(begin) + together - 1 - lane  # of two passes, the second one begins
            for step in range(first, round(end), together):
                kind = "R" if recompute_in_backward and op.kind == "D" and step == begin else op.kind
                letter = kind.lower() if op.chunk else kind
                boxes[rank, step] = Box(f"{letter}{op.micro_batch}", _COLOURS[kind])
    steps = round(verdict.makespan)
    name = f"{title}: {steps} steps"
    columns = [""] * steps
    return Timeline(name, columns, boxes, list(_messages(schedule, verdict.spans)), schedule.shape.pp, 27, 4, 26)


def _messages(schedule: Schedule, spans: tuple[tuple[Span, ...], ...]) -> Iterator[Arrow]:
    """Yield the messages of micro-batch 0 between ranks."""
    shape = schedule.shape
    first = [
        (rank, shape.stage_of(rank, span.op.chunk), span)
        for rank, done in enumerate(spans)
        for span in done
        if span.op.micro_batch == 0
    ]
    ends = {needed(span.op, stage, shape.stages): (rank, round(span.begin)) for rank, stage, span in first}
    for rank, stage, span in first:
        made = produced(span.op, stage, shape.stages)
        if made is not None and (end := ends[made[0]])[0] != rank:
            yield Arrow((rank, round(span.end) - 1), end)
