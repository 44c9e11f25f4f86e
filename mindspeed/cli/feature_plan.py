"""``mindspeed features plan``: the activation plan of a request, every line with its reason."""

from __future__ import annotations

from gettext import gettext
from pathlib import Path
from typing import Final

import click

from mindspeed.cli.output import html_option, json_option, print_result, write_page
from mindspeed.cli.plan_text import as_lines, brief_lines, sections
from mindspeed.cli.request_options import JobCommand, Request, former_script_option, names_argument, request_options
from mindspeed.cli.terminal import wrapped
from mindspeed.problems import localized, marked

_HINT: Final = marked("--all shows patches, notes and the base plan; --why NAME explains one feature")


class _PlanCommand(JobCommand):
    in_check = ("--plan",)


@click.command(cls=_PlanCommand)
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
@former_script_option
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
) -> None:
    """Print the plan of a job: its features and what they change.

    One screen shows where the job runs, the features and why they are active, and settings that differ from defaults. It
    also shows changed Megatron arguments, what is skipped or not checked, and the digest. The plan of a Megatron-LM command
    is printed by mindspeed check --plan.
    """
    request = request.naming(names)
    made = request.plan_of_run()
    if feature is not None:
        from mindspeed.cli.feature_explain import explain_in_plan

        explain_in_plan(made, feature, request)
        return
    if html is not None:
        from mindspeed.cli.plan_html import plan_page

        write_page(html, plan_page(made))
    data = {"problems": [], "plan": made}
    lines = [*(as_lines(sections(made, base)) if whole or base else (*brief_lines(made), *wrapped(gettext(_HINT))))]
    from mindspeed.memory_planner.communicators import communicator_lines
    from mindspeed.registry import catalog

    for line in communicator_lines(made, catalog()):
        lines += wrapped(gettext("communicators of a rank: {line}").format(line=line))
    if memory:
        from mindspeed.memory_planner.plans import peaks, summary

        data["memory"] = peaks(made, catalog())
        lines += as_lines([(marked("memory"), [*map(localized, summary(made, catalog()))])])
    print_result(data, lines)
