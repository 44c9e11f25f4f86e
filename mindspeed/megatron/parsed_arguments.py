"""Problems of the arguments that Megatron-LM has parsed, against the plan and against the layers that are built. Light."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Final

from mindspeed.engine.planning.plan import ActivationPlan, PlannedOverride
from mindspeed.engine.runtime.job_conditions import refusals
from mindspeed.job.fact import Names, Values
from mindspeed.job.megatron_arguments import PutValue
from mindspeed.job.world import World
from mindspeed.plugins.answers import completed
from mindspeed.plugins.feature import Feature
from mindspeed.problems import Fix, GivenValue, Problem, advice


def contradiction(planned: PlannedOverride, given: GivenValue, wanted: Any) -> Problem:
    """MS605 for one argument: ``given`` on a command line or elsewhere, the plan has ``wanted``."""
    owners = " and ".join(planned.owners)
    text = f"{given.source} sets {given.value!r}, but {owners} needs the value {wanted!r}: {planned.override.reason}"
    way = Fix.drop_option(given.option) if given.option else Fix.advise("change the value where Megatron reads it")
    fix = (way, Fix.together(map(Fix.remove_feature, planned.owners)))
    return Problem("MS605", text, planned.owners, where=given.source, fix=fix, facts=(given,))


def refused_values(put: Mapping[str, PutValue], overrides: Sequence[PlannedOverride]) -> list[Problem]:
    """MS605 for every parsed argument that has another value than the plan sets, and not by default."""
    planned = {row.override.argument: row for row in overrides}
    refused = ((planned[argument], one) for argument, one in put.items() if one.refused)
    return [contradiction(row, argument_fact(one.dest, one.before), one.wanted) for row, one in refused]


def problems_of_job(
    made: Mapping[str, tuple[Any, Names]], plan: ActivationPlan, features: Sequence[Feature[Any]]
) -> list[Problem]:
    """MS306 and MS304 for what a plan was not made for, and its features cannot run with, in the job of validated arguments.

    ``made`` are fields of the job with the arguments that decide them. What features make of the arguments counts: some set a
    size in the configuration alone. A value that the plan itself sets contradicts no field.
    """
    planned, put = plan.world.known(), {row.override.argument: row.override.value for row in plan.overrides}
    job = {field: value for field, (value, _) in made.items()}
    world = completed(World(job), ((type(feature), feature.args) for feature in features)).known()
    problems = []
    for field, (_, names) in made.items():
        if field not in planned or planned[field] == (value := world[field]):
            continue
        if value not in (put.get(name) for name in names):
            text = f"the plan was made for {field}={planned[field]}, but Megatron's argument {names[0]} gives {value}"
            option = f"--{names[0].replace('_', '-')}"
            fix = (
                f"give {option} on the command line, because mindspeed does not read values that a script sets, or change "
                f"{field} in the plan"
            )
            problems.append(Problem("MS306", text, where="Megatron-LM's validated arguments", fix=advice(fix)))
    return [*problems, *refusals(job, features)]


def argument_fact(dest: str, value: Any) -> GivenValue:
    """An argument of Megatron-LM of which only the parsed value is known."""
    return GivenValue(dest, value, f"Megatron's argument {dest}")


_UNSUPPORTED: Final = {
    "delay_wgrad_compute": ("--delay-wgrad-compute", "only Transformer Engine's layers can delay weight gradients"),
    "fp8": ("--fp8-format", "local layers ignore it and compute without fp8"),
    "fp4": ("--fp4-format", "local layers ignore it and compute without fp4"),
    "layernorm_zero_centered_gamma": (
        "--apply-layernorm-1p",
        "the norm of local layers is torch's LayerNorm, which has no zero-centered weight",
    ),
}
"""Arguments that Megatron's local layers (``--transformer-impl local``) ignore or cannot build: option and reason."""


def unsupported_arguments(values: Values, given: Mapping[str, GivenValue]) -> list[Problem]:
    """MS605 for every argument in ``values`` that local layers do not support; none for other layers.

    ``values`` are Megatron-LM's arguments by dest with the plan's in place; ``given`` holds those on the command line.
    """
    has_torch_norm = values.get("normalization") in (None, "LayerNorm") and find_spec("apex") is None
    problems = []
    for dest, (option, reason) in _UNSUPPORTED.items() if values.get("transformer_impl") == "local" else ():
        if values.get(dest) and (has_torch_norm or dest != "layernorm_zero_centered_gamma"):
            fact = given.get(dest) or argument_fact(dest, values[dest])
            text = f"{fact.source} sets {values[dest]!r}, but the layers are local (transformer_impl): {reason}"
            problems.append(Problem("MS605", text, where=fact.source, fix=Fix.drop_option(option), facts=(fact,)))
    return problems
