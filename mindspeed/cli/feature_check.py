"""``mindspeed features check``: everything that is wrong with a request, before anything is started."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mindspeed.cli.memory import MemorySize
from mindspeed.cli.output import json_option, print_result
from mindspeed.cli.request_options import Request, names_argument, request_options
from mindspeed.cli.training_command import PlansCommandsFully, RuleOptions, plan_of_command, rules_options, script_option

if TYPE_CHECKING:
    from mindspeed.engine.planning.plan import ActivationPlan
    from mindspeed.engine.resolution.planned_feature import PlanNote


@click.command(cls=PlansCommandsFully)
@names_argument("[NAME]...")
@click.option(
    "--device-memory",
    type=MemorySize(),
    metavar="SIZE",
    help="Memory of a device, such as 60GiB, or in MiB; stages that need more are problems",
)
@script_option
@rules_options
@request_options
@json_option
def check(request: Request, names: tuple[str, ...], script: str | None, device_memory: int | None, rules: RuleOptions) -> None:
    """Find every problem of a job before it starts.

    Features, settings and sizes are checked together, for this machine or for another one that options describe. All
    problems are printed at once. The exit status is 1 when there are any. With --device-memory, a pipeline stage that needs
    more memory is also a problem.

    A Megatron-LM command is checked without running it, from the command line or from the script that starts it:

    mindspeed features check -- pretrain_gpt.py --num-layers 2 --use-fused-rmsnorm ...

    mindspeed features check --platform npu --script pretrain_llama.sh

    Megatron-LM's validation of its arguments also runs, in a separate process without torch. The validation comes from the
    Megatron-LM that the command starts, or from the Megatron-LM folder given with --checkout.
    """
    request = request.naming(names)
    plan = plan_of_command(request, script, rules)
    if plan is None:
        plan = request.plan_of_run()
        plan = replace(plan, rows=(*plan.rows, *_ambiguous_padding(plan, request.train)))
    plan = replace(plan, rows=(*plan.rows, *_unknown_megatron(plan)))
    if device_memory is not None:
        from mindspeed.memory_planner.plans import over_budget
        from mindspeed.problems.problem import MindSpeedError
        from mindspeed.registry import catalog

        if problems := over_budget(plan, catalog(), device_memory / 2**20):
            raise MindSpeedError(problems)
    kinds = {"not-checked": "not checked", "choice": "choice", "warning": "warning"}
    lines = [f"{kinds[row.kind]:<11}  {row.feature}: {row.text}" for row in plan.rows if row.kind in kinds]
    lines.append(f"no problems: {', '.join(plan.names) or 'no features'}; plan {plan.digest}")
    print_result({"problems": [], "plan": plan}, lines)


def _unknown_megatron(plan: ActivationPlan) -> Iterator[PlanNote]:
    """Warn of a plan that knows no version of Megatron, unlike that of every job."""
    from mindspeed.engine.resolution.planned_feature import PlanNote

    if "megatron" not in plan.environment:
        text = "megatron-core is not installed, so patches are not checked and the digest differs from that of a job"
        yield PlanNote("warning", "megatron-core", f"{text}; give --megatron VERSION")


def _ambiguous_padding(plan: ActivationPlan, train: dict[str, Any]) -> Iterator[PlanNote]:
    """Warn of data and a tokenizer with which Megatron-LM would go wrong; our trainer does not."""
    from mindspeed.engine.resolution.planned_feature import PlanNote
    from mindspeed.megatron.pad_token_check import warning

    tokenizer, data = train.get("tokenizer"), train.get("data")
    if isinstance(tokenizer, str) and Path(tokenizer).exists():
        text = warning(tokenizer, [str(data)] if data else [], plan.environment.get("megatron"))
        if text is not None:
            yield PlanNote("warning", "Megatron-LM", f"{text} (mindspeed pretrain pads with a separate id)")
