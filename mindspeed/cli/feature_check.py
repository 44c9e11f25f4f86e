"""``mindspeed features check``: everything that is wrong with a request, before anything is started."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from mindspeed.cli.memory import MemorySize
from mindspeed.cli.output import json_option, print_result
from mindspeed.cli.plan_text import note_lines, verdict
from mindspeed.cli.request_options import FullJobCommand, Request, former_script_option, names_argument, request_options
from mindspeed.problems import Text

if TYPE_CHECKING:
    from mindspeed.engine.planning.plan import ActivationPlan
    from mindspeed.engine.resolution.planned_feature import PlanNote

device_memory_option = click.option(
    "--device-memory",
    type=MemorySize(),
    metavar="SIZE",
    help="Memory of a device, such as 60GiB, or in MiB; stages that need more are problems",
)


@click.command(cls=FullJobCommand)
@names_argument("[NAME]...")
@device_memory_option
@former_script_option
@request_options
@json_option
def check(request: Request, names: tuple[str, ...], device_memory: int | None) -> None:
    """Find every problem of a job before it starts.

    Features, settings and sizes are checked together, for this machine or for another one that options describe. All
    problems are printed at once. The exit status is 1 when there are any. With --device-memory, a pipeline stage that needs
    more memory is also a problem. A Megatron-LM command is checked by mindspeed check.
    """
    plan = plan_of_job(request, names)
    require_memory(plan, device_memory)
    print_result({"problems": [], "plan": plan}, [*note_lines(plan.rows), verdict(plan)])


def plan_of_job(request: Request, names: tuple[str, ...] = ()) -> ActivationPlan:
    """Return the plan of a job, with warnings of what only its run would show. Raises ResolutionError with every problem."""
    plan = request.plan_of_run(names)
    return replace(plan, rows=(*plan.rows, *_ambiguous_padding(plan, request.train), *_unknown_megatron(plan)))


def require_memory(plan: ActivationPlan, device_memory: int | None) -> None:
    """Raise MindSpeedError for the stages of a plan that need more memory than a device has; None is any."""
    if device_memory is None:
        return
    from mindspeed.memory_planner.plans import over_budget
    from mindspeed.problems import MindSpeedError
    from mindspeed.registry import catalog

    if problems := over_budget(plan, catalog(), device_memory / 2**20):
        raise MindSpeedError(problems)


def _unknown_megatron(plan: ActivationPlan) -> Iterator[PlanNote]:
    """Warn of a plan that knows no version of Megatron, unlike that of every job."""
    from mindspeed.engine.resolution.planned_feature import PlanNote

    if "megatron" not in plan.environment:
        text = "megatron-core is not installed, so patches are not checked and the digest differs from that of a job"
        yield PlanNote("warning", "megatron-core", Text.of("{text}; give --megatron VERSION", text=Text.of(text)))


def _ambiguous_padding(plan: ActivationPlan, train: dict[str, Any]) -> Iterator[PlanNote]:
    """Warn of data and a tokenizer with which Megatron-LM would go wrong; our trainer does not."""
    from mindspeed.engine.resolution.planned_feature import PlanNote
    from mindspeed.megatron.pad_token_check import warning

    tokenizer, data = train.get("tokenizer"), train.get("data")
    if isinstance(tokenizer, str) and os.path.exists(tokenizer):
        text = warning(tokenizer, [str(data)] if data else [], plan.environment.get("megatron"))
        if text is not None:
            yield PlanNote("warning", "Megatron-LM", f"{text} (mindspeed pretrain pads with a separate id)")
