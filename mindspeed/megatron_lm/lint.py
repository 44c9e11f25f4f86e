"""Check a training command: Megatron-LM's own rules, executed, and the problems of its plan."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from mindspeed import registry
from mindspeed.engine.planning.plan import ActivationPlan
from mindspeed.engine.resolution.environment import Environment
from mindspeed.engine.resolution.planned_feature import PlanNote
from mindspeed.engine.resolution.request import Layer
from mindspeed.megatron_lm.dry_run import located, plan_command, smallest_world
from mindspeed.megatron_lm.given_arguments import given_arguments, surface_or_nearest, unknown_options
from mindspeed.megatron_lm.launched_command import LaunchedCommand
from mindspeed.megatron_lm.training_request import split_own_flags
from mindspeed.megatron_lm.traps import traps_of
from mindspeed.megatron_lm.upstream.rules import Checkout, Command, judge
from mindspeed.plugins.problems import Problem, ResolutionError

_OF_DEVICES: Final = re.compile(r"(CUDA|NCCL|NVTE|TORCH|PYTORCH|NVSHMEM|UB|HCCL|ASCEND)_\w+")
"""Environment variables that Megatron's rules read."""


def checked_plan(
    command: LaunchedCommand,
    environment: Environment,
    below: Sequence[Layer] = (),
    also: Sequence[Layer] = (),
    checkout: Checkout | None = None,
    arch: str | None = None,
) -> ActivationPlan:
    """The plan of a command that the rules of a checkout accept; without one those are not asked.

    Raises ResolutionError with every problem. Megatron's rules judge the command as it stands: where features of ours are
    requested, which change what Megatron does, what it refuses is a warning.
    """
    problems, notes = _judged(command, environment, checkout, arch) if checkout is not None else ([], [])
    if environment.platform == "cuda":
        notes += _traps(command, environment)
    try:
        plan = plan_command(command, environment, below, also)
    except ResolutionError as error:
        raise ResolutionError([*problems, *error.problems], error.words) from error
    if problems and environment.platform == "cuda" and not _names_features(command, environment, (*below, *also)):
        raise ResolutionError(problems)
    notes += [PlanNote("warning", "megatron-lm", f"{problem.message} ({problem.where})") for problem in problems]
    return replace(plan, rows=(*plan.rows, *notes))


def _judged(
    command: LaunchedCommand, environment: Environment, checkout: Checkout, arch: str | None
) -> tuple[list[Problem], list[PlanNote]]:
    known = surface_or_nearest(environment.megatron)
    _, words = split_own_flags([word.text for word in command.arguments], [])
    size = environment.world_size or command.world_size or smallest_world(words, known)
    (verdict,) = judge(checkout, [Command(words, size, _environ(command))], known, arch)
    catalog = registry.catalog_for(())
    return [located(problem, command, known, catalog) for problem in verdict.problems], list(verdict.notes(checkout))


def _environ(command: LaunchedCommand) -> dict[str, str]:
    """The environment variables of a command that Megatron's rules read."""
    inherited = {name: value for name, value in os.environ.items() if _OF_DEVICES.fullmatch(name)}
    return inherited | dict(command.environ)


def _traps(command: LaunchedCommand, environment: Environment) -> list[PlanNote]:
    known = surface_or_nearest(environment.megatron)
    given = given_arguments([word.text for word in command.arguments], known)
    return [PlanNote("warning", "megatron-lm", str(trap)) for trap in traps_of(given, known, _environ(command))]


def _names_features(command: LaunchedCommand, environment: Environment, layers: Sequence[Layer]) -> bool:
    """Return whether features of ours are requested, or options that only MindSpeed has."""
    own, words = split_own_flags([word.text for word in command.arguments], [])
    return bool(own or unknown_options(words, surface_or_nearest(environment.megatron)) or any(one.features for one in layers))
