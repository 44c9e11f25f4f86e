"""The memory of a plan's job on each pipeline stage, foretold from its sizes and the declarations of its features. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final

from mindspeed import registry
from mindspeed.arithmetic import parameters, shape_of_world
from mindspeed.memory.estimate import NEEDED, JobOptions, Live, Stage, stages
from mindspeed.pipeline.feature import ScheduleFeature
from mindspeed.pipeline.operations import Op, PipelineShape
from mindspeed.pipeline.recompute_feature import RecomputeFeature
from mindspeed.pipeline.synthesis import megatron
from mindspeed.planning.plan import ActivationPlan
from mindspeed.plugins.problems import MindSpeedError, Problem
from mindspeed.plugins.saved_tensors import SavedTensors
from mindspeed.plugins.world import FIELDS, UnknownValue, World

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


def stages_of(made: ActivationPlan, options: JobOptions) -> list[Stage]:
    """Return the stages of a plan. Raises MindSpeedError MS307 where a size that is needed is not known."""
    world = made.world
    try:
        world.need(*NEEDED)
        full, dropped = _passes(made)
        return stages(world, options, _changes(made, "saved"), _changes(made, "resting"), full, dropped)
    except UnknownValue as unknown:
        problems = [
            Problem("MS307", f"{FIELDS[name][1]} is not known", fix=f"--{name.replace('_', '-')}") for name in unknown.fields
        ]
        raise MindSpeedError(problems) from None


def repeats(made: ActivationPlan) -> bool:
    """Return whether the schedule of a plan drops the activations of a pass and repeats it."""
    return any(map(sum, _passes(made)[1] or ()))


def over_budget(made: ActivationPlan, budget: float) -> list[Problem]:
    """Return an MS347 for each stage of a plan whose peak is above ``budget`` MiB."""
    found = []
    for stage in stages_of(made, options_of(made, dropout=False)):
        if stage.peak > budget * MIB:
            text = f"stage {stage.stage} has {stage.peak / MIB:,.1f} MiB at its peak, and a device {budget:,.1f}"
            fix = f"mindspeed memory plan --budget {budget:g} names the features that make it fit"
            found.append(Problem("MS347", text, fix=fix))
    return found


def parameters_of(made: ActivationPlan) -> int:
    """Return the parameters of the model of a plan."""
    return parameters(shape_of_world(made.world)).total


def peaks(made: ActivationPlan) -> list[dict[str, int]]:
    """Return the bytes of each stage at its peak."""
    return [{"stage": stage.stage, "peak": stage.peak} for stage in stages_of(made, options_of(made, dropout=False))]


def summary(made: ActivationPlan) -> list[str]:
    """Describe the bytes of each stage, in MiB."""
    lines = []
    for stage in stages_of(made, options_of(made, dropout=False)):
        parts = {name: sum(row.bytes for row in stage.rows if row.name == name) for name in ("weights", "gradients")}
        parts["optimizer"] = stage.optimizer.device
        parts["activations"] = stage.peak - sum(parts.values())
        text = ", ".join(f"{name} {size / MIB:,.1f}" for name, size in parts.items())
        lines.append(f"stage {stage.stage}: {stage.peak / MIB:,.1f} MiB at the peak: {text}")
    return lines


def _passes(made: ActivationPlan) -> tuple[Live | None, Live | None]:
    """The passes in flight of each stage and chunk, and those that are dropped meanwhile, by the schedule of a feature."""
    known, world = registry.catalog(), made.world
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


def _changes(made: ActivationPlan, what: str) -> Iterator[Callable[[SavedTensors], SavedTensors]]:
    """The changes that the features of a plan declare in a field of their specs."""
    known = registry.catalog()
    for planned in made.features:
        feature = known.feature(planned.name)
        if (change := getattr(feature.spec, what)) is not None:
            yield _applied(change, feature.Args(**planned.args), made.world)


def _applied(change: Any, args: Any, world: World) -> Callable[[SavedTensors], SavedTensors]:
    return partial(change, args, world)
