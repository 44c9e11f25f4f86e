"""A training command in a lock: its arguments as facts, and the plan that it has here."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

from mindspeed import registry
from mindspeed.engine.planning.plan import ActivationPlan
from mindspeed.engine.resolution.request import job_from_data
from mindspeed.megatron_lm.training_plan import plan_training
from mindspeed.workbench.lint.launched_command import LaunchedCommand
from mindspeed.workbench.lint.upstream.process import find_checkout

COMMAND: Final = "command"
"""Key of the job of a lock: ``{program, arguments, processes}`` of the training command that it was made from."""


def locked_command(command: LaunchedCommand, plan: ActivationPlan) -> dict[str, Any]:
    """A training command as the job of a lock has it."""
    arguments = [word.text for word in command.arguments]
    return {"program": command.program, "arguments": arguments, "processes": plan.world.known()["world_size"]}


@contextmanager
def importable(program: str, given: str | None = None) -> Iterator[bool]:
    """Let the Megatron-LM of a program, or the ``given`` one, be found first, as in the job; yields whether there is one."""
    found = find_checkout(program, os.environ, given)
    before = sys.path[:]
    sys.path[:0] = [str(found.folder)] if found is not None else []
    try:
        yield found is not None
    finally:
        sys.path[:] = before


def plan_of_locked(job: Mapping[str, Any]) -> ActivationPlan:
    """The plan that the job of a lock has in this process. Raises MindSpeedError."""
    layer = job_from_data({name: value for name, value in job.items() if name != COMMAND}, "lock file").layer
    if COMMAND not in job:
        return registry.resolve([layer])
    command = job[COMMAND]
    environment = replace(registry.probe(layer.platform), world_size=command["processes"])
    _, plan = plan_training(command["arguments"], {}, environment, [layer])
    return plan
