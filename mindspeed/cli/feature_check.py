"""``mindspeed features check``: everything that is wrong with a request, before anything is started."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mindspeed.cli.output import json_option, print_result
from mindspeed.cli.request_options import FeatureName, FullJobCommand, Request, request_options

if TYPE_CHECKING:
    from mindspeed.planning.plan import ActivationPlan


@click.command(cls=FullJobCommand)
@click.argument("names", metavar="[NAME]...", nargs=-1, type=FeatureName())
@request_options
@json_option
def check(request: Request, names: tuple[str, ...]) -> None:
    """Find every problem of a request.

    Features, settings and sizes are checked together, for this machine or for a made-up one. Problems are printed all at
    once, and the exit status is then 1.
    """
    plan = _with_padding(request.naming(names).plan_of_run(), request.train)
    kinds = {"not-checked": "not checked", "choice": "choice", "warning": "warning"}
    lines = [f"{kinds[row.kind]:<11}  {row.feature}: {row.text}" for row in plan.rows if row.kind in kinds]
    lines.append(f"no problems: {', '.join(plan.names) or 'no features'}; plan {plan.digest}")
    print_result({"problems": [], "plan": plan.to_json()}, lines)


def _with_padding(plan: ActivationPlan, train: dict[str, Any]) -> ActivationPlan:
    """The plan with a warning row when Megatron-LM would go wrong on the job's data and tokenizer; our trainer does not."""
    from mindspeed.megatron.pad_token_check import warning
    from mindspeed.resolution.planned_feature import PlanNote

    tokenizer, data = train.get("tokenizer"), train.get("data")
    if not isinstance(tokenizer, str) or not Path(tokenizer).exists():
        return plan
    text = warning(tokenizer, [str(data)] if data else [], plan.environment.get("megatron"))
    if text is None:
        return plan
    row = PlanNote("warning", "Megatron-LM", f"{text} (mindspeed pretrain pads with an id of its own)")
    return replace(plan, rows=(*plan.rows, row))
