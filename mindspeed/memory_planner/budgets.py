"""The budgets of device memory that settings of features give a rank, held against the memory of a plan."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from mindspeed.engine.planning.plan import ActivationPlan
from mindspeed.engine.resolution.planned_feature import PlanNote
from mindspeed.job.world import UnknownValue
from mindspeed.memory.byte_count import MIB
from mindspeed.plugins.answers import answer, implements
from mindspeed.plugins.constraints import Slot
from mindspeed.plugins.discovery import Catalog
from mindspeed.problems import Fix, Problem, ResolutionError, advice

if TYPE_CHECKING:
    from mindspeed.memory_planner.stages import Stage


def within_budgets(made: ActivationPlan, known: Catalog) -> ActivationPlan:
    """Return a plan whose features can keep a rank within the memory that their settings give it.

    Raises ResolutionError with MS304, which names the least. A size that nobody gave is a row, under strict MS307.
    """
    rows, problems = [], []
    for name, (setting, budget) in _limits(made, known):
        what = f"{setting}={budget:g}"
        try:
            stage, least = least_peak(made, known)
        except UnknownValue as unknown:
            text = f"the memory limit {what} (MiB) cannot be checked, because the model's memory is unknown"
            if made.strict:
                fix = Fix.together(map(Fix.give_field, unknown.fields))
                problems.append(Problem("MS307", f"{name}: {text}", (name,), fix=fix))
            rows.append(PlanNote("not-checked", name, text, tuple(unknown.fields)))
            continue
        if budget * MIB < least:
            mib = math.ceil(least / MIB * 100) / 100
            text = f"{name}: {what} is less than {mib:g}, the MiB that stage {stage} needs even if {name} frees all that it can"
            way = f"--set {name}.{setting}={mib:g} or more, or use more tensor or pipeline parallelism"
            problems.append(Problem("MS304", text, (name,), fix=advice(way)))
    if problems:
        raise ResolutionError(problems)
    return replace(made, rows=(*made.rows, *rows)) if rows else made


def _limits(made: ActivationPlan, known: Catalog) -> Iterator[tuple[str, tuple[str, float]]]:
    """Yield the features that have a limit, each with its setting and the MiB."""
    for planned in made.features:
        if planned.name not in known.usable or not implements(feature := known.feature(planned.name), "budget"):
            continue
        if limit := answer(feature, "budget", feature.Args(**planned.args), made.world):
            yield planned.name, limit


def least_peak(made: ActivationPlan, known: Catalog) -> tuple[int, int]:
    """Return the stage of a plan with the largest peak, and its bytes.

    Where the formulas do not know what layers keep (the sequence split over ranks, experts, other linear layers), only what
    rests, what a process has once, and the inputs of layers count.
    """
    from mindspeed.memory_planner.plans import planned_stages

    found = planned_stages(made, known)
    slots = {slot for planned in made.features if planned.name in known.specs for slot in known.specs[planned.name].slots}
    is_known = made.world.cp == 1 and not made.world.num_experts and Slot.LINEAR not in slots
    peaks = [stage.peak if is_known else _certain(stage) for stage in found]
    return max(enumerate(peaks), key=lambda pair: pair[1])


def _certain(stage: Stage) -> int:
    """Return the bytes of a stage that are certain."""
    from mindspeed.memory_planner.stages import RESTING
    from mindspeed.memory_planner.tensors import LAYER_INPUT

    kept = (row for row in stage.rows if row.held == "kept" and (row.once or row.name in (*RESTING, LAYER_INPUT)))
    return sum(row.bytes * row.live for row in kept)
