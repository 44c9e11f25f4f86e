"""``mindspeed features plan``: the activation plan of a request, every line with its reason."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click

from mindspeed.cli.html_option import html_option, write_page
from mindspeed.cli.output import json_option, print_result
from mindspeed.cli.plan_text import as_lines, brief_lines, sections
from mindspeed.cli.request_options import Request, names_argument, request_options
from mindspeed.cli.terminal import wrapped
from mindspeed.cli.training_command import PlansCommands, RuleOptions, plan_of_command, script_option

_HINT: Final = "--all shows patches, notes and the base plan; --why NAME explains one feature"


@click.command(cls=PlansCommands)
@names_argument("[NAME]...")
@click.option(
    "--all",
    "whole",
    is_flag=True,
    help="Also show all patches, the features' notes on what settings mean in this job, and what mindspeed changes in every "
    "job (the base plan)",
)
@click.option("--why", "feature", metavar="NAME", help="Explain one feature in this plan, like features explain")
@click.option("--memory", is_flag=True, help="Show the peak memory of each pipeline stage, in MiB")
@click.option("--base", is_flag=True, help="Show the same as --all, and each function that the platform patches")
@html_option("plan, ranks and patches")
@script_option
@request_options
@json_option
def plan(
    request: Request,
    names: tuple[str, ...],
    whole: bool,
    feature: str | None,
    memory: bool,
    base: bool,
    html: Path | None,
    script: str | None,
) -> None:
    """Print the plan of a job: its features and what they change.

    One screen shows where the job runs, the features and why they are active, and settings that differ from defaults. It
    also shows changed Megatron arguments, what is skipped or not checked, and the digest.

    Plan a Megatron-LM command from the command line or from the script that starts it:

    mindspeed features plan -- pretrain_gpt.py --num-layers 2 --use-fused-rmsnorm ...

    mindspeed features plan --platform npu --script pretrain_llama.sh
    """
    request = request.naming(names)
    of_command = plan_of_command(request, script, RuleOptions())
    made = of_command or request.plan_of_run()
    if feature is not None:
        from mindspeed.cli.feature_explain import explain_in_plan

        explain_in_plan(made, feature, request if of_command is None else None)
        return
    if html is not None:
        from mindspeed.cli.plan_html import plan_page

        write_page(html, plan_page(made))
    data = {"problems": [], "plan": made}
    lines = [*(as_lines(sections(made, base)) if whole or base else (*brief_lines(made), *wrapped(_HINT)))]
    if memory:
        from mindspeed.memory_planner.plans import peaks, summary
        from mindspeed.registry import catalog

        data["memory"] = peaks(made, catalog())
        lines += as_lines([("memory", summary(made, catalog()))])
    print_result(data, lines)
