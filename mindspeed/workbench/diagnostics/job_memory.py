"""Predicted memory of a plan's job on each pipeline stage, from its sizes and the declarations of its features. No torch."""

from __future__ import annotations

from typing import Final

from mindspeed import registry
from mindspeed.engine.planning.plan import ActivationPlan
from mindspeed.job.arithmetic import parameters, shape_of_world
from mindspeed.job.world import FIELDS, UnknownValue
from mindspeed.memory.estimate import Stage
from mindspeed.memory.layer_tensors import JobOptions
from mindspeed.pipeline.plan_memory import MIB, foretold, options_of, passes_of
from mindspeed.problems.fixes import Fix, advice
from mindspeed.problems.problem import MindSpeedError, Problem

__all__ = ["MIB", "options_of", "over_budget", "parameters_of", "peaks", "repeats", "shares", "stages_of", "summary"]

UNCOUNTED_LAYERS: Final = Problem(
    "MS307",
    "the hybrid layer pattern has layers of unknown memory: Mamba (M), gated delta net (G) or sparse attention (D)",
    fix=Fix.advise(
        "to estimate roughly, replace M, G and D in --hybrid-layer-pattern by * (attention) or + (latent attention)"
    ),
)


def stages_of(made: ActivationPlan, options: JobOptions) -> list[Stage]:
    """Return the stages of a plan. Raises MindSpeedError with MS307, whose fix gives every size that is missing."""
    try:
        return foretold(made, options, registry.catalog())
    except UnknownValue as unknown:
        if "hybrid_layer_pattern" in unknown.fields:
            raise MindSpeedError([UNCOUNTED_LAYERS]) from None
        text = f"memory cannot be estimated without {', '.join(unknown.fields)}"
        fix = Fix.together(tuple(Fix.give_field(name, True if FIELDS[name].kind is bool else None) for name in unknown.fields))
        raise MindSpeedError([Problem("MS307", text, fix=fix)]) from None


def repeats(made: ActivationPlan) -> bool:
    """Return whether the schedule of a plan drops the activations of a pass and repeats it."""
    return any(map(sum, passes_of(made, registry.catalog())[1] or ()))


def over_budget(made: ActivationPlan, budget: float) -> list[Problem]:
    """Return an MS347 for each stage of a plan whose peak is above ``budget`` MiB."""
    found = []
    for stage in stages_of(made, options_of(made, dropout=False)):
        if stage.peak > budget * MIB:
            text = f"the peak of stage {stage.stage} is {stage.peak / MIB:,.1f} MiB, but a device has {budget:,.1f} MiB"
            fix = f"mindspeed memory plan --budget-mib {budget:g} shows the features that make it fit"
            found.append(Problem("MS347", text, fix=advice(fix)))
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
        text = ", ".join(f"{name} {size / MIB:,.1f}" for name, size in shares(stage).items() if name != "peak")
        lines.append(f"stage {stage.stage}: {stage.peak / MIB:,.1f} MiB at the peak: {text}")
    return lines


def shares(stage: Stage) -> dict[str, int]:
    """Return the bytes of a stage at its peak, and where they go."""
    parts = {name: sum(row.bytes for row in stage.rows if row.name == name) for name in ("weights", "gradients")}
    parts["optimizer"] = stage.optimizer.device
    return {"peak": stage.peak, **parts, "activations": stage.peak - sum(parts.values())}
