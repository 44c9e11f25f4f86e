"""Numbers of runs side by side: losses, time, memory and communication, as a table and as curves. Light."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from mindspeed.files.step_log import LOG, read_log
from mindspeed.problems import Problem, RunError, advice
from mindspeed.process.run import PLAN
from mindspeed.workbench.html_page import details, figures, page, paragraph, section, table
from mindspeed.workbench.pictures.curves import BASELINE, COLOURS, Bars, Chart, Line, drawn, drawn_bars
from mindspeed.workbench.training.comparison import JobSide, differences, has_plan, side_of_run

WARM_UP: Final = 3
"""Steps at the start of a run that do not count for its time."""
HEADERS: Final = ("run", "steps", "first loss", "last loss", "difference", "s/step", "peak memory", "communicated/step")
PEAK: Final = "costs.peak_mib"
COMMUNICATED: Final = "costs.communicated_mib"
"""Keys of what a feature that provides `Capability.STEP_COSTS` measures."""
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
        return max((value for _, value in points(self.rows, PEAK)), default=None)

    @cached_property
    def communicated_mib(self) -> float | None:
        """Communication of the last step."""
        return next((value for _, value in reversed(points(self.rows, COMMUNICATED))), None)

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


def points(rows: Iterable[Mapping[str, Any]], key: str) -> list[tuple[float, float]]:
    """Return the finite values of a key by step, a dotted one inside of others.

    Of a step that was logged twice the last counts. A skipped step has no norm.
    """
    logged = ((row["step"], _value(row, key)) for row in rows if "step" in row)
    return sorted({step: value for step, value in logged if value is not None and math.isfinite(value)}.items())


def _value(row: Any, key: str) -> Any:
    for part in key.split("."):
        row = row.get(part) if isinstance(row, Mapping) else None
    return row


def read_run(folder: Path, name: str = "", against: RunNumbers | None = None) -> RunNumbers:
    """Read the log of a run folder. Raises RunError with MS602 for a folder without one, or a log without a loss."""
    try:
        run = RunNumbers(name or str(folder), folder, read_log(folder / LOG), against)
        reason = "" if run.steps else f"its {LOG} has no step with a loss"
    except OSError as error:
        reason = f"{LOG} cannot be read: {error.strerror}"
    if reason:
        fix = "give the folder of a run of mindspeed pretrain, mindspeed compare, or Megatron-LM with a feature that logs steps"
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
    if unknown := [run.name for run in runs if not has_plan(run.folder)]:
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


_CURVES: Final = (
    ("loss", "Loss", "loss (nats per token)"),
    ("seconds", "Time of a step", "time (s)"),
    (PEAK, "Peak memory of a step", "memory (MiB)"),
    (COMMUNICATED, "Communication of a step", "data (MiB)"),
    ("gradient_norm", "Gradient norm", "norm (dimensionless)"),
    ("learning_rate", "Learning rate", "rate (dimensionless)"),
)
_BEHIND_WARM_UP: Final = "seconds"


def curves(run: RunNumbers, planned_mib: float | None = None) -> list[str]:
    """Return the curves of a run by step, over those of the run that it is compared with, and the peak that a plan predicts."""
    return [drawn(chart) for key, title, up in _CURVES if (chart := _chart(run, key, title, up, planned_mib)) is not None]


def _chart(run: RunNumbers, key: str, title: str, up: str, planned_mib: float | None) -> Chart | None:
    found = points(run.rows, key)
    if not found:
        return None
    note, lines = "", []
    if run.against is not None:
        lines.append(Line(run.against.name, points(run.against.rows, key), colour=BASELINE))
    lines.append(Line("training" if key == "loss" and run.against is None else run.name, found, colour=COLOURS[0]))
    if key == _BEHIND_WARM_UP and len(found) > 2 * WARM_UP:
        lines = [Line(line.name, line.points[WARM_UP:], colour=line.colour) for line in lines]
        note = f"without the first {WARM_UP} steps; the first one took {rounded(found[0][1])} s"
    if key == "loss" and (held_out := points(run.rows, "heldout_loss")):
        lines.append(Line("held out", held_out, "points", COLOURS[1]))
    levels = [("planned", planned_mib, COLOURS[1])] if key == PEAK and planned_mib is not None else []
    if key == _BEHIND_WARM_UP and run.seconds is not None and run.against is None:
        levels = [("median", run.seconds, BASELINE)]
    return Chart(title, "step", up, lines, note, levels, from_zero=key in (_BEHIND_WARM_UP, PEAK, COMMUNICATED))


def rounded(value: float) -> str:
    """Return a number with three digits that count, or as a whole number with separators."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def comparison_page(title: str, runs: Sequence[RunNumbers], remarks: Sequence[str]) -> str:
    """Return one HTML page: the table, what else differs, effects, losses over each other, and losses side by side."""
    steps = sorted({step for run in runs for step in run.losses})
    shown = steps[:: -(-len(steps) // _SHOWN_STEPS)]
    losses = [[f"{step:g}", *(f"{run.losses[step]:.6f}" if step in run.losses else "-" for run in runs)] for step in shown]
    return page(
        title,
        section("Runs", table(HEADERS, rows_of(runs)), paragraph(COMPARED, "note"), *map(paragraph, remarks)),
        _effects(runs),
        *map(_over_each_other, runs),
        details("Losses side by side", table(("step", *(run.name for run in runs)), losses)),
    )


def _over_each_other(run: RunNumbers) -> str:
    """Return the curves of a run over those of the run that it is compared with; a reader opens those of further runs."""
    if run.against is None:
        return ""
    put = section if run.against.against is None else details
    return put(f"{run.against.name}, {run.name}", figures(*curves(run)))


def _effects(runs: Sequence[RunNumbers]) -> str:
    """Return the changes of time, memory and communication from the run that each is compared with, as bars."""
    compared = [(run, run.against) for run in runs if run.against is not None]
    drawings = []
    for name, title in (("seconds", "Time of a step"), ("peak_mib", "Peak memory"), ("communicated_mib", "Communication")):
        found = [(run.name, getattr(run, name), getattr(other, name)) for run, other in compared]
        changes = [(label, 100 * (own / before - 1)) for label, own, before in found if own and before]
        if any(round(change, 1) for _, change in changes):
            drawings.append(drawn_bars(Bars(title, "change (%)", changes, _CHANGES)))
    return section("Effects", figures(*drawings)) if drawings else ""


_CHANGES: Final = "from the run that each is compared with"
COMPARED: Final = (
    "In parentheses: the change from the first run, for a run without one feature the change from the run with all. "
    "Difference: the largest difference of a loss in a step. Time: the median of the steps after the third. Memory and "
    "communication: of the rank that has most."
)
