"""``mindspeed doctor``: what this machine has, what it lacks, and how to get it."""

from __future__ import annotations

import click

from mindspeed.cli.output import exit_code, json_option, print_json, wants_json


@click.command()
@json_option
@click.pass_context
def doctor(ctx: click.Context) -> None:
    """Show what this machine has and lacks.

    Versions, every copy of Megatron, devices, compilers. The exit status is 3 when something needed is missing.
    """
    from mindspeed.doctor import examine

    findings = []
    for finding in examine():
        findings.append(finding)
        if not wants_json():
            mark = "" if finding.state == "ok" else f"  [{finding.state}]"
            click.echo(f"{finding.subject:<14} {finding.value}{mark}")
            if finding.fix:
                click.echo(f"{'':<14}   fix: {finding.fix}")
    problems = [problem for finding in findings if (problem := finding.problem()) is not None]
    if wants_json():
        rows = [finding.to_json() for finding in findings]
        print_json({"findings": rows, "problems": [problem.to_json() for problem in problems]})
    elif problems:
        click.echo(f"\n{len(problems)} missing: {', '.join(problem.message for problem in problems)}")
    ctx.exit(exit_code(problems))
