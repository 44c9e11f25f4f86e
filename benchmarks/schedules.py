"""How close is the fastest schedule to the optimum, and how much do steps that overlap save? Compared in the simulator.

``python -m benchmarks.schedules`` prints two tables; ``--write`` puts them into docs/pipelines.md.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from mindspeed.pipeline.bounds import lower_bound, shortest_period
from mindspeed.pipeline.operations import Costs, PipelineShape
from mindspeed.pipeline.search import fastest
from mindspeed.pipeline.simulator import judge, period
from mindspeed.pipeline.synthesis import delayed, lag_by_rank, megatron, zero_bubble_v
from mindspeed.workbench.pages.markdown import table

PAGE: Final = Path(__file__).parents[1] / "docs" / "pipelines.md"
FASTEST, OVERLAPPING, END = "<!-- fastest schedules -->\n", "<!-- overlapping steps -->\n", "<!-- end -->"
HEADERS: Final = (
    "pp x vpp, micro-batches",
    "F:B:W, hop",
    "limit",
    "lags only",
    "second scheduler",
    "fastest (sets kept)",
    "lower bound",
    "above the bound",
)
LAGS: Final = [step / 4 for step in range(9)]
STEPS, OPERATIONS = 2_000, 30_000
"""Choices that the second scheduler follows in depth, and operations in all of its draws."""


class Case(NamedTuple):
    shape: PipelineShape
    costs: Costs
    text: str
    limit: int | None = None


def _ends(stages: int, first: float, last: float, middle: float = 1.0) -> tuple[float, ...]:
    return (first, *(middle,) * (stages - 2), last)


UNEQUAL: Final = Costs(1.0, 1.3, 0.8), "1:1.3:0.8"
LONG_BACKWARD: Final = Costs(1.0, 2.0, 0.7, hop=0.1), "1:2:0.7, 0.1"


def _with_head(stages: int) -> tuple[Costs, str]:
    costs = Costs(_ends(stages, 1.1, 1.6), _ends(stages, 1.0, 1.9, 1.2), _ends(stages, 1.0, 1.4, 0.9), hop=0.05)
    return costs, "embedding and output layer, 0.05"


CASES: Final = [
    Case(PipelineShape(2, 1, 4), *UNEQUAL),
    Case(PipelineShape(4, 1, 8), *UNEQUAL),
    Case(PipelineShape(8, 1, 16), *UNEQUAL),
    Case(PipelineShape(8, 1, 16), *UNEQUAL, 12),
    Case(PipelineShape(8, 1, 16), *UNEQUAL, 8),
    Case(PipelineShape(8, 1, 16), *UNEQUAL, 6),
    Case(PipelineShape(16, 1, 32), *UNEQUAL),
    Case(PipelineShape(16, 1, 64), *UNEQUAL),
    Case(PipelineShape(8, 1, 4), *UNEQUAL),
    Case(PipelineShape(4, 1, 12), *LONG_BACKWARD),
    Case(PipelineShape(8, 1, 24), *LONG_BACKWARD),
    Case(PipelineShape(4, 1, 12), *_with_head(4)),
    Case(PipelineShape(8, 1, 24), *_with_head(8)),
    Case(PipelineShape(4, 2, 8), *UNEQUAL),
    Case(PipelineShape(8, 2, 16), *LONG_BACKWARD),
    Case(PipelineShape(4, 3, 12), *_with_head(12)),
    Case(PipelineShape(4, 2, 8, "v"), *UNEQUAL),
    Case(PipelineShape(8, 2, 16, "v"), *UNEQUAL, 16),
    Case(PipelineShape(4, 2, 6, "v"), *LONG_BACKWARD),
    Case(PipelineShape(8, 2, 12, "v"), *_with_head(16)),
]


def lags_only(shape: PipelineShape, costs: Costs, limit: int | None) -> float:
    """Return the makespan of what was searched before: weight gradients behind by a lag of the rank, or ZB-V."""
    base = megatron(shape)
    v = shape.placement == "v"
    schedules = [zero_bubble_v(shape)] if v else [delayed(base, lag_by_rank(factor, shape.pp)) for factor in LAGS]
    verdicts = [judge(schedule, costs) for schedule in schedules]
    return min((verdict.makespan for verdict in verdicts if limit is None or max(verdict.peak) <= limit), default=float("nan"))


def rows() -> Iterator[tuple[str, ...]]:
    from tests.pipeline.oracle import Oracle

    for shape, costs, text, limit in CASES:
        operations = 3 * shape.stages * shape.micro_batches
        oracle = Oracle(shape, costs, limit).shortest(STEPS, max(5, OPERATIONS // operations))
        verdict, bound = fastest(shape, costs, "none", limit)[1], lower_bound(shape, costs, limit)
        before = lags_only(shape, costs, limit)
        yield (
            f"{shape.pp} x {shape.vpp}{', placement v' if shape.placement == 'v' else ''}, {shape.micro_batches}",
            text,
            "" if limit is None else str(limit),
            "none" if before != before else f"{before:.5g}",
            "none" if oracle == float("inf") else f"{oracle:.5g}",
            f"{verdict.makespan:.5g} ({max(verdict.peak)})",
            f"{bound:.5g}",
            f"{max(0.0, verdict.makespan / bound - 1):.1%}",
        )


OVERLAPPING_HEADERS: Final = (
    "pp x vpp, micro-batches",
    "limit",
    "synchronized (sets kept)",
    "overlapping, same schedule",
    "overlapping (sets kept)",
    "lower bound",
    "gain",
)
OVERLAPPING_CASES: Final = [
    (PipelineShape(4, 1, 8), None),
    (PipelineShape(8, 1, 16), None),
    (PipelineShape(8, 1, 16), 8),
    (PipelineShape(8, 1, 64), None),
    (PipelineShape(8, 1, 64), 24),
    (PipelineShape(16, 1, 64), None),
    (PipelineShape(16, 1, 64), 32),
    (PipelineShape(4, 2, 8), None),
    (PipelineShape(8, 2, 16, "v"), 16),
]


def overlapping_rows() -> Iterator[tuple[str, ...]]:
    costs, _ = UNEQUAL
    for shape, limit in OVERLAPPING_CASES:
        alone, overlapping = (fastest(shape, costs, "none", limit, repeated) for repeated in (False, True))
        step, own, least = alone[1].makespan, period(alone[0], costs), period(overlapping[0], costs)
        yield (
            f"{shape.pp} x {shape.vpp}{', placement v' if shape.placement == 'v' else ''}, {shape.micro_batches}",
            "" if limit is None else str(limit),
            f"{step:.5g} ({max(alone[1].peak)})",
            f"{own:.5g}",
            f"{least:.5g} ({max(overlapping[1].peak)})",
            f"{shortest_period(shape, costs):.5g}",
            f"{max(0.0, 1 - least / step):.1%}",
        )


if __name__ == "__main__":
    for begin, made in (
        (FASTEST, table(HEADERS, rows())),
        (OVERLAPPING, table(OVERLAPPING_HEADERS, overlapping_rows())),
    ):
        print("\n".join(made))
        if "--write" in sys.argv:
            before, rest = PAGE.read_text("utf-8").split(begin)
            after = rest[rest.index(END) :]
            PAGE.write_text(before + begin + "\n".join(made) + "\n" + after, "utf-8")
