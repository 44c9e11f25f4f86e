"""Work in parts, so that the collective of one part travels while another part is multiplied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

from mindspeed.plugins import Problem, report_problem
from mindspeed.problems import advice

LEAST_ROWS: Final = 8
"""Rows of a rank in the smallest part: with fewer, starting a product and a collective costs more than what is hidden."""

Stage: TypeAlias = Callable[[int, Any], Any]
"""Receives the number of a part and what the stage before it returned for that part."""


def run_in_parts(parts: int, *stages: Stage) -> None:
    """Bring every part through all stages, each part one stage behind the part before it.

    A stage that begins a collective comes before the stage that waits for it: in between the later stages work on earlier
    parts. A part's value is released when its last stage has returned.
    """
    values: dict[int, Any] = {}
    for tick in range(parts + len(stages) - 1):
        for depth, stage in enumerate(stages):
            if 0 <= (part := tick - depth) < parts:
                values[part] = stage(part, values.pop(part, None))


def parts_that_fit(feature: str, asked: int, rows: int, fix: str = "") -> int:
    """The number of parts for ``rows`` rows of a rank: ``asked``, halved until it divides them into `LEAST_ROWS` or more.

    Fewer parts than asked for are a row in the report (MS414). ``fix`` is that of the problem, with {parts} for the number.
    """
    parts = asked
    while parts > 1 and (rows % parts or rows // parts < LEAST_ROWS):
        parts //= 2
    if parts < asked:
        text = (
            f"{feature}: the {rows} rows (tokens) of a linear layer's input cannot be split into {asked} equal chunks of at "
            f"least {LEAST_ROWS} rows. The job continues with {parts} chunks"
        )
        report_problem(Problem("MS414", text, (feature,), fix=advice(fix.format(parts=parts))))
    return parts
