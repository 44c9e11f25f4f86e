"""The memory of a plan's stages for commands: all sizes that are not set are one problem."""

from __future__ import annotations

from typing import Final

from mindspeed import registry
from mindspeed.engine.planning.plan import ActivationPlan
from mindspeed.job.world import FIELDS, UnknownValue
from mindspeed.memory.estimate import JobOptions, Stage
from mindspeed.pipeline.plan_memory import foretold
from mindspeed.plugins.fixes import Advice, GiveField, Together
from mindspeed.plugins.problems import MindSpeedError, Problem

HYBRID: Final = Problem(
    "MS307",
    "the memory of a HybridModel is not estimated",
    fix=Advice("estimate a GPTModel, each of whose layers has attention and an MLP or experts"),
)


def stages_by_sizes(made: ActivationPlan, options: JobOptions) -> list[Stage]:
    """Return the stages of a plan. Raises MindSpeedError with MS307, whose fix gives every size that is missing."""
    try:
        return foretold(made, options, registry.catalog())
    except UnknownValue as unknown:
        if made.world.is_hybrid:
            raise MindSpeedError([HYBRID]) from None
        text = f"memory cannot be estimated without {', '.join(unknown.fields)}"
        fix = Together(tuple(_giving(name) for name in unknown.fields))
        raise MindSpeedError([Problem("MS307", text, fix=fix)]) from None


def _giving(name: str) -> GiveField:
    """Return the step that gives a field a value; a switch is given as true."""
    return GiveField(name, True if FIELDS[name].kind is bool else None)
