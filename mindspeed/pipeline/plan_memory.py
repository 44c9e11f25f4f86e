"""The memory of a plan on each pipeline stage, from its sizes and the declarations of its features. Light, no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from mindspeed.engine.planning.plan import ActivationPlan
from mindspeed.engine.resolution.planned_feature import PlanNote
from mindspeed.engine.resolution.setting_validation import flag
from mindspeed.job.world import UnknownValue
from mindspeed.memory.estimate import NEEDED, RESTING, Live, Stage, stages
from mindspeed.memory.layer_tensors import LAYER_INPUT, JobOptions
from mindspeed.pipeline.feature import ScheduleFeature
from mindspeed.pipeline.operations import Op, PipelineShape
from mindspeed.pipeline.recompute_feature import RecomputeFeature
from mindspeed.pipeline.synthesis import megatron
from mindspeed.plugins.answers import answer, changed_tensors, implements
from mindspeed.plugins.constraints import Slot
from mindspeed.plugins.discovery import Catalog
from mindspeed.plugins.saved_tensors import SavedTensors
from mindspeed.problems.fixes import Fix, advice
from mindspeed.problems.problem import Problem, ResolutionError

MIB: Final = 2**20


def options_of(made: ActivationPlan, dropout: bool) -> JobOptions:
    """Return the options of a plan's job."""
    values = {planned.override.argument: planned.override.value for planned in made.overrides}
    return JobOptions(
        on_cpu=made.environment.get("platform") == "cpu",
        sequence_parallel=bool(values.get("sequence_parallel")),
        distributed_optimizer=bool(values.get("use_distributed_optimizer")),
        dropout=dropout,
    )


def foretold(made: ActivationPlan, options: JobOptions, known: Catalog) -> list[Stage]:
    """Return the stages of a plan, whose features are in a catalog. Raises `UnknownValue` with every size that is needed."""
    made.world.need(*NEEDED)
    full, dropped = passes_of(made, known)
    return stages(made.world, options, _changes(made, known, "saved_tensors"), _changes(made, known, "resting"), full, dropped)


def keeping_budgets(made: ActivationPlan, known: Catalog) -> ActivationPlan:
    """Return a plan whose features can keep a rank within the memory that their settings give it.

    Raises ResolutionError with MS304, which names the least. A size that nobody gave is a row, under strict MS307.
    """
    rows, problems = [], []
    for planned in made.features:
        name = planned.name
        if name not in known.usable or not implements(known.feature(name), "budget"):
            continue
        limit = answer(known.feature(name), "budget", known.feature(name).Args(**planned.args), made.world)
        if limit is None:
            continue
        setting, budget = limit
        what = f"{setting}={budget:g}"
        try:
            stage, least = least_peak(made, known)
        except UnknownValue as unknown:
            flags = ", ".join(map(flag, unknown.fields))
            if made.strict:
                text = f"{name}: the memory limit {what} (MiB) cannot be checked, because the model's memory is unknown"
                problems.append(Problem("MS307", text, (name,), fix=Fix.advise(f"give {flags}")))
            text = f"the memory limit {what} (MiB) cannot be checked, because the model's memory is unknown; give {flags}"
            rows.append(PlanNote("not-checked", name, text, tuple(unknown.fields)))
            continue
        if budget * MIB < least:
            mib = math.ceil(least / MIB * 100) / 100
            text = f"{name}: {what} is less than {mib:g}, the MiB that stage {stage} needs even if {name} frees all that it can"
            fix = f"--set {name}.{setting}={mib:g} or more, or use more tensor or pipeline parallelism"
            problems.append(Problem("MS304", text, (name,), fix=advice(fix)))
    if problems:
        raise ResolutionError(problems)
    return replace(made, rows=(*made.rows, *rows)) if rows else made


def least_peak(made: ActivationPlan, known: Catalog) -> tuple[int, int]:
    """Return the stage of a plan with the largest peak, and its bytes.

    Where the formulas do not know what layers keep (the sequence split over ranks, experts, other linear layers), only what
    rests, what a process has once, and the inputs of layers count.
    """
    found = foretold(made, options_of(made, dropout=False), known)
    slots = {slot for planned in made.features if planned.name in known.specs for slot in known.specs[planned.name].slots}
    is_known = made.world.cp == 1 and not made.world.num_experts and Slot.LINEAR not in slots
    peaks = [stage.peak if is_known else _certain(stage) for stage in found]
    return max(enumerate(peaks), key=lambda pair: pair[1])


def _certain(stage: Stage) -> int:
    kept = (row for row in stage.rows if row.held == "kept" and (row.once or row.name in (*RESTING, LAYER_INPUT)))
    return sum(row.bytes * row.live for row in kept)


def passes_of(made: ActivationPlan, known: Catalog) -> tuple[Live | None, Live | None]:
    """The passes in flight of each stage and chunk, and the dropped ones, by the schedule of a feature."""
    world = made.world
    classes = [(known.feature(planned.name), planned.args) for planned in made.features]
    features = [feature(feature.Args(**args), world) for feature, args in classes]
    lists = [feature for feature in features if isinstance(feature, ScheduleFeature)]
    recomputes = [feature for feature in features if isinstance(feature, RecomputeFeature)]
    if world.pp == 1 or not (lists or recomputes):
        return None, None
    shape = PipelineShape(world.pp, world.vpp, world.num_micro_batches, lists[0].placement() if lists else "loop")
    schedule = lists[0].planned_schedule(shape, lists[0].costs()) if lists else megatron(shape)
    for feature in recomputes:
        schedule = feature.listed(schedule)
    peaks = [_at_peak(ops, world.vpp) for ops in schedule.ops]
    return [full for full, _ in peaks], [dropped for _, dropped in peaks]


def _at_peak(ops: Sequence[Op], vpp: int) -> tuple[list[int], list[int]]:
    """Of the operations of a rank: the passes of each chunk whose activations exist at the peak, and those that are dropped."""
    repeated = {op[1:] for op in ops if op.kind == "R"}
    full, dropped = [0] * vpp, [0] * vpp
    peak = (list(full), list(dropped))
    for op in ops:
        if op.kind == "F" and op[1:] in repeated:
            dropped[op.chunk] += 1
        elif op.kind in "FR":
            full[op.chunk] += 1
            dropped[op.chunk] -= op.kind == "R"
        elif op.kind in "WD":
            full[op.chunk] -= 1
        if (sum(full), sum(dropped)) > (sum(peak[0]), sum(peak[1])):
            peak = (list(full), list(dropped))
    return peak


def _changes(made: ActivationPlan, known: Catalog, what: str) -> Iterator[Callable[[SavedTensors], SavedTensors]]:
    """The changes that the features of a plan make, by the hook ``saved_tensors`` or ``resting``."""
    for planned in made.features:
        feature = known.feature(planned.name)
        if implements(feature, what):
            yield changed_tensors(feature, what, feature.Args(**planned.args), made.world)
