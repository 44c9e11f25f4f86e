"""Numbers of finished runs side by side: losses, time, memory and communication, as a table and as a page. Light."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from mindspeed.files.step_log import LOG, read_log
from mindspeed.problems import Problem, RunError, advice
from mindspeed.workbench.html_page import chart, page, paragraph, section, table
from mindspeed.workbench.training.comparison import PLAN, JobSide, differences, side_of_run
from mindspeed.workbench.training.reporting import points

WARM_UP: Final = 3
"""Steps at the start of a run that do not count for its time."""
HEADERS: Final = ("run", "steps", "first loss", "last loss", "difference", "s/step", "peak memory", "communicated/step")
_COSTS: Final = "costs"
"""Key of a row with what a feature that provides `Capability.STEP_COSTS` measures."""
_SHOWN_STEPS: Final = 50
"""Rows of the losses on a page."""
_NOT_OF_JOBS: Final = ("feature", "setting", "order", "plan", "patch", "argument", "source", "target", "operator")
"""Kinds of facts in which runs with other features differ anyway."""


@dataclass(frozen=True)
class RunNumbers:
    """Hold the log of one run. ``against`` is the run that its numbers are compared with, None for the first one."""

    name: str
    folder: Path
    rows: Sequence[dict[str, Any]]
    against: RunNumbers | None = None

    @cached_property
    def losses(self) -> dict[float, float]:
        """The finite losses by step."""
        return dict(points(self.rows, "loss"))

    @property
    def steps(self) -> int:
        """Number of logged steps."""
        return len(self.losses)

    @cached_property
    def seconds(self) -> float | None:
        """Median time of a step; the first steps do not count where there are others."""
        found = [value for _, value in points(self.rows, "seconds")]
        return statistics.median(found[WARM_UP:] or found) if found else None

    @cached_property
    def peak_mib(self) -> float | None:
        """Peak memory of all steps."""
        return max(self._costs("peak_mib"), default=None)

    @cached_property
    def communicated_mib(self) -> float | None:
        """Communication of the last step."""
        return next(reversed(self._costs("communicated_mib")), None)

    @cached_property
    def largest_difference(self) -> float | None:
        """The largest difference of a loss from that of the same step of the other run."""
        other = self.against.losses if self.against is not None else {}
        return max((abs(loss - other[step]) for step, loss in self.losses.items() if step in other), default=None)

    def to_json(self) -> dict[str, Any]:
        """Return the numbers as a JSON object."""
        names = ("name", "steps", "seconds", "peak_mib", "communicated_mib", "largest_difference")
        numbers = {name: getattr(self, name) for name in names}
        against = self.against.name if self.against is not None else None
        return numbers | {"folder": str(self.folder), "against": against, "losses": self.losses}

    def _costs(self, name: str) -> list[float]:
        return [value for _, value in points((row | row[_COSTS] for row in self.rows if _COSTS in row), name)]


def read_run(folder: Path, name: str = "", against: RunNumbers | None = None) -> RunNumbers:
    """Read the log of a run folder. Raises RunError with MS602 for a folder without one, or a log without a loss."""
    try:
        run = RunNumbers(name or str(folder), folder, read_log(folder / LOG), against)
        reason = "" if run.steps else f"its {LOG} has no step with a loss"
    except OSError as error:
        reason = f"{LOG} cannot be read: {error.strerror}"
    if reason:
        fix = "give the folder of a run of mindspeed pretrain or mindspeed compare"
        raise RunError([Problem("MS602", f"{folder} is not the folder of a run: {reason}", where=str(folder), fix=advice(fix))])
    return run


def notes_on_lengths(runs: Sequence[RunNumbers]) -> Iterator[str]:
    """Yield the runs that have other steps than the first one."""
    first, *others = runs
    for run in others:
        common = len(first.losses.keys() & run.losses.keys())
        if not common:
            yield f"{first.name} and {run.name} have no step in common, so their losses are not compared"
        elif first.losses.keys() != run.losses.keys():
            yield f"{first.name} has {first.steps} steps and {run.name} has {run.steps}; the {common} common steps are compared"


def notes_on_jobs(runs: Sequence[RunNumbers]) -> Iterator[str]:
    """Yield in what the jobs of other runs differ from that of the first one: features, data, options and sizes."""
    if unknown := [run.name for run in runs if not (run.folder / PLAN).is_file()]:
        yield f"features, data and options are not compared, because there is no {PLAN} in {', '.join(unknown)}"
        return
    first, *others = ((run.name, side_of_run(run.folder)) for run in runs)
    for other in others:
        yield from _differences(*first, *other)


def _differences(first: str, kept: JobSide, second: str, other: JobSide) -> Iterator[str]:
    found = differences(kept, other)
    features = [row for row in found if row.kind == "feature"]
    for name, missing in ((first, "second"), (second, "first")):
        if own := [row.name for row in features if getattr(row, missing) is None]:
            yield f"features of {name} only: {', '.join(own)}"
    for row in found:
        if row.kind not in _NOT_OF_JOBS:
            yield f"{row.key} is {row.first} in {first}, but {row.second} in {second}"


def rows_of(runs: Iterable[RunNumbers]) -> list[list[str]]:
    """Return the cells of the table under `HEADERS`; in parentheses the change from the run that a run is compared with."""
    return [_row(run) for run in runs]


def _row(run: RunNumbers) -> list[str]:
    steps = sorted(run.losses)
    difference = run.largest_difference
    return [
        run.name,
        str(run.steps),
        *(f"{run.losses[step]:.4f}" for step in (steps[0], steps[-1])),
        "-" if difference is None else f"{difference:.1e}" if difference else "0",
        *(_changed(run, name, form) for name, form in (("seconds", "{:.3g}"), *_SIZES)),
    ]


_SIZES: Final = (("peak_mib", "{:,.1f} MiB"), ("communicated_mib", "{:,.2f} MiB"))


def _changed(run: RunNumbers, name: str, form: str) -> str:
    """Return a number, and by how much it differs from that of the other run."""
    value, other = getattr(run, name), getattr(run.against, name, None)
    if value is None:
        return "-"
    change = f" ({value / other - 1:+.0%})" if other else ""
    return form.format(value) + change


def comparison_page(title: str, runs: Sequence[RunNumbers], remarks: Sequence[str]) -> str:
    """Return one HTML page: the table, what else differs, losses over each other, and losses side by side."""
    steps = sorted({step for run in runs for step in run.losses})
    shown = steps[:: -(-len(steps) // _SHOWN_STEPS)]
    losses = [[f"{step:g}", *(f"{run.losses[step]:.6f}" if step in run.losses else "-" for run in runs)] for step in shown]
    return page(
        title,
        section("Runs", table(HEADERS, rows_of(runs)), paragraph(COMPARED), *map(paragraph, remarks)),
        *(_curves(run.against, run) for run in runs if run.against is not None),
        section("Losses side by side", table(("step", *(run.name for run in runs)), losses)),
    )


def _curves(first: RunNumbers, second: RunNumbers) -> str:
    """Return the curves of two runs over each other."""
    charts = (
        paragraph(title) + chart({run.name: points(run.rows, key) for run in (first, second)}, title)
        for key, title in (("loss", "Loss (nats per token)"), ("seconds", "Time of a step (seconds)"))
    )
    return section(f"{first.name}, {second.name}", *charts)


COMPARED: Final = (
    "In parentheses: the change from the first run, for a run without one feature the change from the run with all. "
    "Difference: the largest difference of a loss in a step. Time: the median of the steps after the third. Memory and "
    "communication: of the rank that has most."
)
