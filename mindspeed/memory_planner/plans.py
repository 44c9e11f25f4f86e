"""The memory of a plan on each pipeline stage, from its sizes and the declarations of its features. Light, no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from mindspeed.engine.planning.plan import ActivationPlan
from mindspeed.job.world import UnknownValue, World
from mindspeed.memory.byte_count import MIB
from mindspeed.memory_planner.stages import NEEDED, Passes, Stage, stages
from mindspeed.memory_planner.tensors import JobOptions
from mindspeed.pipeline.conditions import planned_shape
from mindspeed.pipeline.feature import ScheduleFeature
from mindspeed.pipeline.operations import Op, Schedule
from mindspeed.pipeline.recompute_feature import RecomputeFeature
from mindspeed.pipeline.synthesis import megatron
from mindspeed.plugins.answers import changed_tensors, implements
from mindspeed.plugins.discovery import Catalog
from mindspeed.plugins.feature import Feature
from mindspeed.plugins.saved_tensors import SavedTensors
from mindspeed.problems import Fix, MindSpeedError, Problem, Text, advice

UNCOUNTED_LAYERS: Final = Problem(
    "MS307",
    "the hybrid layer pattern has layers of unknown memory: Mamba (M), gated delta net (G) or sparse attention (D)",
    fix=Fix.advise(
        "to estimate roughly, replace M, G and D in --hybrid-layer-pattern by * (attention) or + (latent attention)"
    ),
)
Active = Mapping[str, tuple[type[Feature[Any]], Any]]
"""The class and the arguments of each active feature, by name."""


def stages_of(made: ActivationPlan, known: Catalog, dropout: bool = False) -> list[Stage]:
    """Return the stages of a plan, whose features are in a catalog.

    Raises MindSpeedError with MS307, whose fix gives every size that is missing.
    """
    try:
        return planned_stages(made, known, dropout)
    except UnknownValue as unknown:
        if "hybrid_layer_pattern" in unknown.fields:
            raise MindSpeedError([UNCOUNTED_LAYERS]) from None
        text = f"memory cannot be estimated without {', '.join(unknown.fields)}"
        fix = Fix.together(map(Fix.give_field, unknown.fields))
        raise MindSpeedError([Problem("MS307", text, fix=fix)]) from None


def planned_stages(made: ActivationPlan, known: Catalog, dropout: bool = False) -> list[Stage]:
    """Return the stages of a plan. Raises `UnknownValue` with every size that is needed."""
    made.world.need(*NEEDED)
    arguments = {planned.override.argument: planned.override.value for planned in made.overrides}
    options = JobOptions(
        on_cpu=made.environment.get("platform") == "cpu",
        sequence_parallel=bool(arguments.get("sequence_parallel")),
        distributed_optimizer=bool(arguments.get("use_distributed_optimizer")),
        dropout=dropout,
    )
    active = _active(made, known)
    saved, resting = (changes(active, hook, made.world) for hook in ("saved_tensors", "resting"))
    return stages(made.world, options, saved, resting, passes_with(made.world, active))


def peak_of(made: ActivationPlan, known: Catalog) -> int:
    """Return the bytes of the fullest rank of a plan. Raises MindSpeedError with MS307."""
    return max(stage.peak for stage in stages_of(made, known))


def peaks(made: ActivationPlan, known: Catalog) -> list[dict[str, int]]:
    """Return the bytes of each stage at its peak, for JSON."""
    return [{"stage": stage.stage, "peak": stage.peak} for stage in stages_of(made, known)]


def repeats(made: ActivationPlan, known: Catalog) -> bool:
    """Return whether the schedule of a plan drops the activations of a pass and repeats it."""
    passes = passes_with(made.world, _active(made, known))
    return passes is not None and any(map(sum, passes.dropped))


def over_budget(made: ActivationPlan, known: Catalog, budget: float) -> list[Problem]:
    """Return an MS347 for each stage of a plan whose peak is above ``budget`` MiB."""
    found = []
    for stage in stages_of(made, known):
        if stage.peak > budget * MIB:
            text = f"the peak of stage {stage.stage} is {stage.peak / MIB:,.1f} MiB, but a device has {budget:,.1f} MiB"
            fix = f"mindspeed memory plan --budget-mib {budget:g} shows the features that make it fit"
            found.append(Problem("MS347", text, fix=advice(fix)))
    return found


def summary(made: ActivationPlan, known: Catalog) -> list[str]:
    """Describe the bytes of each stage, in MiB."""
    return [
        Text.of(
            "stage {stage}: {peak:,.1f} MiB at the peak: weights {weights:,.1f}, gradients {gradients:,.1f}, "
            "optimizer {optimizer:,.1f}, activations {activations:,.1f}",
            stage=stage.stage,
            **{name: size / MIB for name, size in shares(stage).items()},
        )
        for stage in stages_of(made, known)
    ]


def shares(stage: Stage) -> dict[str, int]:
    """Return the bytes of a stage at its peak, and where they go."""
    parts = {name: sum(row.bytes for row in stage.rows if row.name == name) for name in ("weights", "gradients")}
    parts["optimizer"] = stage.optimizer.device
    return {"peak": stage.peak, **parts, "activations": stage.peak - sum(parts.values())}


def has_schedule(feature: type[Feature[Any]]) -> bool:
    """Return whether a feature provides a pipeline schedule, or recomputes in one."""
    return issubclass(feature, (ScheduleFeature, RecomputeFeature))


def passes_with(world: World, active: Active) -> Passes | None:
    """Return the passes in flight by the schedules of these features; None where they have none."""
    if world.pp == 1 or not any(has_schedule(feature) for feature, _ in active.values()):
        return None
    schedule = _schedule_with(world, active)
    peaks = [_at_peak(ops, world.vpp) for ops in schedule.ops]
    return Passes([full for full, _ in peaks], [dropped for _, dropped in peaks], schedule.shape.placement)


def schedule_of(made: ActivationPlan, known: Catalog) -> Schedule:
    """Return the pipeline schedule of a plan. Raises `UnknownValue`, and ValueError where no schedule keeps the settings."""
    return _schedule_with(made.world, _active(made, known))


def _schedule_with(world: World, active: Active) -> Schedule:
    features = [feature(args, world) for feature, args in active.values() if has_schedule(feature)]
    lists = [feature for feature in features if isinstance(feature, ScheduleFeature)]
    shape = planned_shape(world, lists[0].placement() if lists else "loop")
    schedule = lists[0].planned_schedule(shape, lists[0].costs()) if lists else megatron(shape)
    for feature in features:
        if isinstance(feature, RecomputeFeature):
            schedule = feature.listed(schedule)
    return schedule


def changes(active: Active, hook: str, world: World) -> Iterator[Callable[[SavedTensors], SavedTensors]]:
    """Yield the changes that features make, by the hook ``saved_tensors`` or ``resting``."""
    for feature, args in active.values():
        if implements(feature, hook):
            yield changed_tensors(feature, hook, args, world)
        if hook == "resting" and issubclass(feature, ScheduleFeature):
            yield feature(args, world).with_copies


def _active(made: ActivationPlan, known: Catalog) -> Active:
    features = {planned.name: (known.feature(planned.name), planned.args) for planned in made.features}
    return {name: (feature, feature.Args(**args)) for name, (feature, args) in features.items()}


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
