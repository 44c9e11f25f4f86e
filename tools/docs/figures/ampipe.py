"""Pictures of ampipe: when attention, experts and transfers of each chunk run."""

from __future__ import annotations

from typing import Any, Final

from mindspeed.features.ampipe.layers import pipelined
from mindspeed.workbench.pictures.drawing import Picture
from tools.docs.drawing import Arrow, Box, Timeline

PHASES: Final = ("attention", "experts", "combine")


def order(chunks: int) -> list[tuple[str, int]]:
    """The phases of chunks in the order in which they are computed."""
    computed: list[tuple[str, int]] = []

    def steps(chunk: int) -> Any:
        for phase in PHASES:
            computed.append((phase, chunk))
            if phase != PHASES[-1]:
                yield

    pipelined([steps(chunk) for chunk in range(chunks)])
    return computed


def timeline(chunks: int) -> Timeline:
    """What is computed above what travels, each in the colour of its chunk, where every phase and transfer takes one step."""
    times = {what: time for time, what in enumerate(order(chunks))}
    boxes = {(0, time): Box(phase, chunk) for (phase, chunk), time in times.items()}
    arrows = []
    for name, before, after in (("dispatch", *PHASES[:2]), ("return", *PHASES[1:])):
        for chunk in range(chunks):
            start, travel = times[before, chunk], times[before, chunk] + 1
            boxes[1, travel] = Box(name, chunk)
            arrows += [Arrow((0, start), (1, travel)), Arrow((1, travel), (0, times[after, chunk]), "result")]
    columns = [str(time + 1) for time in range(len(times))]
    return Timeline(f"{chunks} chunks", columns, boxes, arrows, ranks=2, width=66, gap=8, names=("computes", "travels"))


PICTURES = (
    Picture(
        "ampipe",
        "Forward of one layer in chunks",
        "Each chunk has a colour. Its dispatch overlaps with attention of the next chunk, or with the first "
        "experts. Its return overlaps with the next experts. Only the last return does not overlap with "
        "experts. Backward runs from right to left.",
        ((timeline(2),), (timeline(4),)),
    ),
)
