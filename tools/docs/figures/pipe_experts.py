"""Pictures of pipe-experts: when the transfers and the products of each unit run."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from mindspeed.features.deepspeed_moe.units import Step, schedule
from mindspeed.workbench.pictures.drawing import Picture
from tools.docs.drawing import Arrow, Box, Timeline

ROWS: Final = {"dispatch": "dispatch", "gather": "gather", "": "products", "scatter": "scatter", "return": "return"}
"""The rows of a picture by the leg of a step; a step without a leg computes."""


@dataclass
class Clock:
    """Time in steps of one transfer or product. Each leg has a link of its own, on which transfers follow one another."""

    now: int = 0
    ends: dict[tuple[str, int], int] = field(default_factory=dict)
    taken: dict[tuple[str, int], int] = field(default_factory=dict)
    """The unit that a leg, or the products with an empty name, has at a time."""

    def run(self, step: Step) -> None:
        """Post, wait or compute; a unit has two products, and what is done between them comes after the first."""
        if step.act == "post":
            free = [time + 1 for leg, time in self.taken if leg == step.leg]
            start = max(self.now, *free) if free else self.now
            self.taken[step.leg, start] = step.unit
            self.ends[step.leg, step.unit] = start + 1
        elif step.act == "wait":
            self.now = max(self.now, self.ends[step.leg, step.unit])
        elif step.act == "compute":
            self._multiply(step.unit)
            for inner in step.between:
                self.run(inner)
            self._multiply(step.unit)

    def _multiply(self, unit: int) -> None:
        self.taken["", self.now] = unit
        self.now += 1


def timeline(title: str, units: int, gathers: bool = False, one_group: bool = False) -> Timeline:
    """The products between the transfers that bring and return the rows of a unit, each unit in its own colour."""
    clock = Clock()
    for step in schedule(units, gathers, one_group):
        clock.run(step)
    legs = [leg for leg in ROWS if any(leg == taken for taken, _ in clock.taken)]
    boxes = {(legs.index(leg), time): Box(f"unit {unit}", unit) for (leg, time), unit in clock.taken.items()}
    arrows = []
    for unit in range(units):
        way = sorted((time, row) for (row, time), box in boxes.items() if box.rank == unit)
        moves = [((row, time), (to, then)) for (time, row), (then, to) in pairwise(way) if row != to]
        arrows += [Arrow(begin, end, "near" if legs[end[0]] in ("gather", "") else "result") for begin, end in moves]
    columns = [str(time + 1) for time in range(max(time for _, time in boxes) + 1)]
    names = [ROWS[leg] for leg in legs]
    return Timeline(title, columns, boxes, arrows, ranks=len(legs), width=52, gap=8, names=names)


PICTURES = (
    Picture(
        "pipe-experts",
        "Forward of the experts of one layer in units",
        "Each unit (one slice of the tokens of one expert) has a colour. Its two products take twice the "
        "time of a transfer. The first dispatch and the last return do not overlap. If tensor-parallel ranks "
        "share experts, the next unit is gathered and the previous one scattered during the products of a "
        "unit. With `streams`, these transfers and those of the expert-parallel group alternate. Backward "
        "runs from right to left.",
        (
            (timeline("4 units", 4),),
            (timeline("3 units, experts shared by tensor ranks", 3, gathers=True),),
            (timeline("3 units, experts shared by tensor ranks, streams", 3, gathers=True, one_group=True),),
        ),
    ),
)
