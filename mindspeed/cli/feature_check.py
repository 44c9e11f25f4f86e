"""``mindspeed features check``: everything that is wrong with a request, before anything is started."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mindspeed.cli.output import json_option, print_result
from mindspeed.cli.request_options import Request, names_argument, request_options
from mindspeed.cli.training_command import PlansCommandsFully, plan_of_command, script_option

if TYPE_CHECKING:
    from mindspeed.engine.planning.plan import ActivationPlan


@click.command(cls=PlansCommandsFully)
@names_argument("[NAME]...")
@click.option("--device-memory", type=click.FloatRange(0, min_open=True), metavar="MIB", help="memory of a device, in MiB")
@script_option
@request_options
@json_option
@click.pass_context
def check(
    ctx: click.Context, request: Request, names: tuple[str, ...], script: str | None, device_memory: float | None
) -> None:
    """Find every problem of a request.

    Features, settings and sizes are checked together, for this machine or for a made-up one. Problems are printed all at
    once, and the exit status is then 1. With --device-memory a pipeline stage that needs more at its peak is one.

    A command of Megatron-LM is checked without being run, from words or from the script that starts it:

    mindspeed features check -- pretrain_gpt.py --num-layers 2 --use-fused-rmsnorm ...

    mindspeed features check --platform npu --script pretrain_llama.sh
    """
    request = request.naming(names)
    plan = plan_of_command(ctx, request, script) or _with_padding(request.plan_of_run(), request.train)
    plan = _with_unknown_megatron(plan)
    if device_memory is not None:
        _require_memory(plan, device_memory)
    kinds = {"not-checked": "not checked", "choice": "choice", "warning": "warning"}
    lines = [f"{kinds[row.kind]:<11}  {row.feature}: {row.text}" for row in plan.rows if row.kind in kinds]
    lines.append(f"no problems: {', '.join(plan.names) or 'no features'}; plan {plan.digest}")
    print_result({"problems": [], "plan": plan.to_json()}, lines)


def _require_memory(plan: ActivationPlan, device_memory: float) -> None:
    from mindspeed.diagnostics.job_memory import over_budget
    from mindspeed.plugins.problems import MindSpeedError

    if problems := over_budget(plan, device_memory):
        raise MindSpeedError(problems)


def _with_unknown_megatron(plan: ActivationPlan) -> ActivationPlan:
    """The plan with a warning row when it knows no version of Megatron, unlike that of every job."""
    from mindspeed.engine.resolution.planned_feature import PlanNote

    if "megatron" in plan.environment:
        return plan
    text = "no megatron-core is installed here, so patches are not checked and the digest is not that of a job"
    return replace(plan, rows=(*plan.rows, PlanNote("warning", "megatron-core", f"{text}; give --megatron VERSION")))


def _with_padding(plan: ActivationPlan, train: dict[str, Any]) -> ActivationPlan:
    """The plan with a warning row when Megatron-LM would go wrong on the job's data and tokenizer; our trainer does not."""
    from mindspeed.engine.resolution.planned_feature import PlanNote
    from mindspeed.megatron.pad_token_check import warning

    tokenizer, data = train.get("tokenizer"), train.get("data")
    if not isinstance(tokenizer, str) or not Path(tokenizer).exists():
        return plan
    text = warning(tokenizer, [str(data)] if data else [], plan.environment.get("megatron"))
    if text is None:
        return plan
    row = PlanNote("warning", "Megatron-LM", f"{text} (mindspeed pretrain pads with an id of its own)")
    return replace(plan, rows=(*plan.rows, row))
