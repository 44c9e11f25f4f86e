"""``report.html`` of a run of ``mindspeed pretrain`` or of Megatron-LM, from the files in its folder. Light."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final, cast

from mindspeed import registry
from mindspeed.engine.planning.plan import ActivationPlan
from mindspeed.files.step_log import LOG, read_log
from mindspeed.files.step_record import SECTIONS, StepRecord, read_records
from mindspeed.job.world import UnknownValue, World
from mindspeed.memory.byte_count import MIB
from mindspeed.memory_planner.plans import schedule_of, stages_of
from mindspeed.memory_planner.stages import Stage
from mindspeed.pipeline.drawing import Timeline, as_svg, lanes
from mindspeed.pipeline.operations import Costs, Kind, Op, PipelineShape, Schedule
from mindspeed.pipeline.simulator import Span, judge
from mindspeed.problems import MindSpeedError
from mindspeed.workbench.html_page import (
    bar,
    details,
    figures,
    heading,
    inline,
    legend,
    page,
    paragraph,
    section,
    table,
    tiles,
)
from mindspeed.workbench.pictures.curves import COLOURS, Chart, Line, drawn
from mindspeed.workbench.pictures.drawing import svg
from mindspeed.workbench.pictures.plan_graph import plan_graph
from mindspeed.workbench.pictures.stage_memory import memory_bars
from mindspeed.workbench.training.comparison import effects_of_run, plan_of_run
from mindspeed.workbench.training.run_numbers import HEADERS, RunNumbers, curves, points, rounded, rows_of

PAGE: Final = "report.html"
RESULT: Final = "result.json"
_OWN_CURVES: Final = {"step", "loss", "heldout_loss", "learning_rate", "gradient_norm", "seconds", "costs"}
_CHARTS, _LINES, _STAGES = 6, 6, 4
"""Charts of the numbers of features, lines in each, and stages whose memory is drawn."""
_KINDS: Final[tuple[Kind, ...]] = ("F", "B", "W", "R")


@dataclass(frozen=True)
class FinishedRun:
    """Hold what the folder of a run contains. All but the log may be missing."""

    folder: Path
    numbers: RunNumbers

    @cached_property
    def plan(self) -> ActivationPlan | None:
        """The plan; None where none was written, or by another version."""
        try:
            return plan_of_run(self.folder)
        except MindSpeedError:
            return None

    @cached_property
    def effects(self) -> list[dict[str, Any]]:
        """The effects of each feature."""
        found: list[dict[str, Any]] = effects_of_run(self.folder).get("features", [])
        return found

    @cached_property
    def result(self) -> dict[str, Any]:
        """The result of ``mindspeed pretrain``."""
        try:
            found: dict[str, Any] = json.loads((self.folder / RESULT).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found

    @cached_property
    def records(self) -> list[StepRecord]:
        """The recorded step, of each pipeline stage."""
        return read_records(self.folder)

    @cached_property
    def planned_memory(self) -> list[Stage] | str:
        """The memory that the plan predicts for each stage, or why there is none."""
        if self.plan is None:
            return "the run has no plan that can be read"
        if missing := self.not_installed:
            return f"{', '.join(missing)} is not installed here"
        sizes = {name: size for record in self.records for name, size in record.sizes.items()}
        world = World({**sizes, **self.plan.world.known()}, self.plan.world.layer_split)
        try:
            return stages_of(replace(self.plan, world=world), registry.catalog())
        except MindSpeedError as error:
            return "; ".join(problem.message for problem in error.problems)

    @property
    def not_installed(self) -> list[str]:
        """The features of the plan that do not exist here."""
        return [] if self.plan is None else [name for name in self.plan.names if name not in registry.catalog().usable]

    @property
    def planned_mib(self) -> float | None:
        """The largest predicted peak."""
        stages = self.planned_memory
        return None if isinstance(stages, str) else max(stage.peak for stage in stages) / MIB

    @property
    def tokens(self) -> int | None:
        """Tokens of a step."""
        try:
            return None if self.plan is None else int(self.plan.world.seq_length * self.plan.world.global_batch_size)
        except UnknownValue:
            return None


def report_page(folder: Path, baseline: RunNumbers | None = None) -> str:
    """Return the page of a run, over the curves of another one where it is compared. Raises OSError for a missing log."""
    numbers = RunNumbers(folder.name if baseline is None else str(folder), folder, read_log(folder / LOG), baseline)
    run = FinishedRun(folder, numbers)
    parts = [
        _summary(run),
        section("Curves", figures(*curves(numbers, run.planned_mib))),
        _against(numbers),
        _of_features(numbers),
        _sections(run.records),
        _memory(run),
        _timeline(run),
        _graph(run),
        _effects(run.effects),
        _job(run),
    ]
    return page(f"Run {folder.name}", *filter(None, parts))


def _summary(run: FinishedRun) -> str:
    """Return the numbers that one looks for first."""
    numbers, result, shown = run.numbers, run.result, []
    if numbers.losses:
        (_, first), (last_step, last) = (sorted(numbers.losses.items())[place] for place in (0, -1))
        shown.append(("loss", f"{last:.4f}", f"from {first:.4f}, at step {last_step:g}"))
    if result.get("heldout_loss") is not None:
        shown.append(("held-out loss", f"{result['heldout_loss']:.4f}", "at the end"))
    if numbers.seconds is not None:
        shown.append(("time of a step", f"{rounded(numbers.seconds)} s", "median without the first steps"))
        if run.tokens:
            shown.append(("throughput", f"{rounded(run.tokens / numbers.seconds)} tokens/s", f"{run.tokens:,} tokens a step"))
    if numbers.peak_mib is not None:
        predicted = f"the plan predicts {run.planned_mib:,.1f} MiB" if run.planned_mib is not None else "of the fullest rank"
        shown.append(("peak memory", f"{numbers.peak_mib:,.1f} MiB", predicted))
    if numbers.communicated_mib is not None:
        shown.append(("communication", f"{rounded(numbers.communicated_mib)} MiB", "per step, of the rank with most"))
    if run.plan is not None:
        active = len(run.plan.names)
        shown.append(("features", str(active), f"plan {run.plan.digest[:12]}"))
    return tiles(shown)


def _against(numbers: RunNumbers) -> str:
    """Return the numbers of the run beside those of the one that it is compared with."""
    if numbers.against is None:
        return ""
    return section(f"Compared with {numbers.against.name}", table(HEADERS, rows_of([numbers.against, numbers])))


def _of_features(numbers: RunNumbers) -> str:
    """Return curves of the numbers that features and losses of the model log, a chart for each feature."""
    names: defaultdict[str, dict[str, None]] = defaultdict(dict)
    for row in numbers.rows:
        for key, value in row.items():
            if key not in _OWN_CURVES:
                names[key] |= dict.fromkeys(_paths(key, value))
    charts = []
    for key, paths in names.items():
        if lines := [Line(path.removeprefix(f"{key}."), points(numbers.rows, path)) for path in list(paths)[:_LINES]]:
            charts.append(drawn(Chart(key, "step", "value (as logged)", lines)))
    return section("Numbers of features", figures(*charts[:_CHARTS])) if charts else ""


def _paths(key: str, value: Any) -> Iterator[str]:
    """Yield the dotted names of numbers."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _paths(f"{key}.{name}", inner)
    elif isinstance(value, int | float):
        yield key


def _sections(records: Sequence[StepRecord]) -> str:
    """Return where the time of the recorded step went, as a bar and a column for each stage."""
    if not records:
        return ""
    used = {name for record in records for name in record.sections}
    names = [name for name in SECTIONS if name in used]
    longest = max(record.seconds for record in records)
    bars = [
        heading(f"stage {record.stage}: {1e3 * record.seconds:,.1f} ms")
        + bar([(f"{name} (ms)", 1e3 * record.sections.get(name, 0)) for name in names], 1e3 * longest)
        for record in records
    ]
    rows = [[name, *(f"{1e3 * record.sections.get(name, 0):,.2f}" for record in records)] for name in names]
    numbers = table(("milliseconds", *(f"stage {record.stage}" for record in records)), rows, "numbers")
    note = f"Step {records[0].step}, on one rank of each pipeline stage."
    return section("Time of a step by section", paragraph(note, "note"), legend(names), *bars, numbers)


def _memory(run: FinishedRun) -> str:
    """Return the memory over a step beside the plan, for the fullest stages, and what the plan consists of."""
    stages = run.planned_memory
    by_stage = {} if isinstance(stages, str) else {stage.stage: stage for stage in stages}
    measured = sorted((record for record in run.records if record.memory), key=_peak, reverse=True)[:_STAGES]
    charts = [drawn(_memory_chart(record, by_stage.get(record.stage))) for record in measured]
    parts = [figures(*charts)] if charts else []
    if isinstance(stages, str):
        parts.append(paragraph(f"No prediction: {stages}.", "note") if parts else "")
    else:
        parts += [heading("Predicted by the plan, at the peak"), memory_bars(stages)]
    return section("Memory", *parts) if any(parts) else ""


def _peak(record: StepRecord) -> int:
    return max(level.bytes for level in record.memory)


def _memory_chart(record: StepRecord, stage: Stage | None) -> Chart:
    working = [number for number, level in enumerate(record.memory) if level.passes]
    levels = record.memory[max(0, working[0] - 1) if working else 0 :]
    at = [1e3 * (level.seconds - levels[0].seconds) for level in levels]
    lines = [Line("measured", [(time, level.bytes / MIB) for time, level in zip(at, levels, strict=True)], colour=COLOURS[0])]
    peaks = []
    if stage is not None:
        each = stage.activations / (max((span.chunk for span in record.spans), default=0) + 1)
        planned = [(stage.resting + each * level.passes) / MIB for level in levels]
        lines.append(Line("planned", list(zip(at, planned, strict=True)), "steps", COLOURS[1]))
        peaks = [("planned peak", stage.peak / MIB, COLOURS[1])]
    note = f"forward and backward passes of step {record.memory_step}"
    return Chart(f"Stage {record.stage}", "time since the first pass (ms)", "memory (MiB)", lines, note, peaks, from_zero=True)


def _timeline(run: FinishedRun) -> str:
    """Return the passes of the recorded step on each pipeline rank, and the same schedule as it is planned."""
    records = [record for record in run.records if any(span.kind != "L" for span in record.spans)]
    if not records:
        return ""
    start = min(record.clock for record in records)
    recorded = [_operations(record, record.clock - start) for record in records]
    first = min(rank[0].begin for rank in recorded)
    recorded = [[Span(op, begin - first, end - first) for op, begin, end in rank] for rank in recorded]
    length = max(rank[-1].end for rank in recorded)
    timelines: list[tuple[str, Timeline]] = [(f"as it ran in step {records[0].step}: {1e3 * length:,.1f} ms", recorded)]
    if (planned := _planned(run, records)) is not None:
        schedule, spans, makespan = planned
        title = f"planned {schedule.name}, by mean durations: {1e3 * makespan:,.1f} ms"
        timelines.append((title, spans))
    note = "Numbers are micro-batches; pale operations are of the model chunks 1, 3 and so on of a rank."
    return section("Pipeline schedule", paragraph(note, "note"), as_svg(timelines, width=None))


def _operations(record: StepRecord, later: float) -> list[Span]:
    spans = (span for span in record.spans if span.kind != "L")
    found = (Span(Op(cast("Kind", s.kind), s.chunk, s.micro_batch), s.begin + later, s.end + later) for s in spans)
    return sorted(found, key=lambda span: span.begin)


def _planned(run: FinishedRun, records: Sequence[StepRecord]) -> tuple[Schedule, Timeline, float] | None:
    """Return the schedule of the plan with the durations that were measured; None for one rank or what cannot be planned."""
    if run.plan is None or len(records) < 2 or len(records) != run.plan.world.pp or run.not_installed:
        return None
    try:
        schedule = schedule_of(run.plan, registry.catalog())
    except (UnknownValue, ValueError, MindSpeedError):
        return None
    verdict = judge(schedule, mean_costs(records, schedule.shape))
    return None if verdict.problems else (schedule, verdict.spans, verdict.makespan)


def mean_costs(records: Sequence[StepRecord], shape: PipelineShape) -> Costs:
    """Return the mean duration of each kind of operation on each stage; two that ran together count half of their time each."""
    durations: dict[tuple[str, int], list[float]] = defaultdict(list)
    for record in records:
        for (op, begin, end), _, together in lanes(_operations(record, 0.0)):
            kind = "B" if op.kind == "D" else op.kind
            durations[kind, shape.stage_of(record.stage, op.chunk)].append((end - begin) / together)
    means = {kind: tuple(statistics.fmean(durations[kind, stage] or [0.0]) for stage in range(shape.stages)) for kind in _KINDS}
    return Costs(means["F"], means["B"], means["W"], means["R"])


def _graph(run: FinishedRun) -> str:
    """Return the graph of the plan of this job, with the calls of the patched functions."""
    if run.plan is None:
        return ""
    calls = {
        point["name"]: point["calls"]
        for feature in run.effects
        for point in feature.get("points", ())
        if point["kind"] == "patch" and point["calls"]
    }
    text = "What is requested, what is added, and which modules of Megatron that changes; calls are those until the first step."
    picture = plan_graph(run.plan, "Features and patches of this job", text, calls)
    return section("Features and patches", paragraph(text, "note"), inline(svg(picture), "wide")) if picture is not None else ""


def _effects(effects: Sequence[Mapping[str, Any]]) -> str:
    """Return what each feature reached."""
    rows = [(feature["name"], feature["summary"].removeprefix(f"{feature['name']}: ")) for feature in effects]
    return details("Effects of features", table(("feature", "sites, and whether they were reached"), rows)) if rows else ""


def _job(run: FinishedRun) -> str:
    """Return the sizes of the job and the result."""
    known = {**run.plan.environment, **run.plan.world.known()} if run.plan is not None else {}
    rows = [(name, str(value)) for name, value in known.items()]
    result = [(name, f"{value:.6g}" if isinstance(value, float) else str(value)) for name, value in run.result.items()]
    return (details("Job", table(("field", "value"), rows)) if rows else "") + (
        details("Result", table(("", ""), result)) if result else ""
    )
