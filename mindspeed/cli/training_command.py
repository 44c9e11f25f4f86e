"""A training command as the job of a verb: the words after ``--``, or a script."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from mindspeed.cli.request_options import JobCommand, Request, gather_options

if TYPE_CHECKING:
    from mindspeed.engine.planning.plan import ActivationPlan
    from mindspeed.problems import MindSpeedError
    from mindspeed.workbench.lint.judgement import CheckedJob
    from mindspeed.workbench.lint.launched_command import LaunchedCommand
    from mindspeed.workbench.lint.traps import Trap
    from mindspeed.workbench.lint.upstream.process import Checkout

WORDS: Final = "mindspeed.training_command"


class PlansCommands(JobCommand):
    """A verb that takes a training command behind ``--``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            ctx.meta[WORDS] = args[at + 1 :]
            args = args[:at]
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- COMMAND ...]"]


def _capability(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    if value is not None and not re.fullmatch(r"[0-9]{1,2}(\.[0-9])?", value):
        raise click.BadParameter("give a compute capability such as 9.0", ctx, parameter)
    return value


class RuleOptions(NamedTuple):
    """The Megatron-LM whose rules are run, and the compute capability that they see; with ``static`` none are run."""

    static: bool = True
    checkout: str | None = None
    arch: str | None = None


_CHECKOUT: Final = "Checkout of Megatron-LM whose argument validation is run  [default: that of the script in the command]"
_ARCH: Final = "Compute capability of the devices, for example 9.0"
_RULES: Final[dict[str, click.Option]] = {
    "checkout": click.Option(["--checkout"], metavar="FOLDER", help=_CHECKOUT),
    "arch": click.Option(["--arch"], metavar="X.Y", callback=_capability, help=_ARCH),
    "static": click.Option(
        ["--static"],
        is_flag=True,
        help="Skip Megatron-LM's validation of the arguments of a training command; only mindspeed's checks then run",
    ),
}


def rules_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of `RuleOptions`, which the verb receives as ``rules``."""
    return gather_options(command, _RULES, "rules", lambda values: RuleOptions(**values))


_NO_RULES: Final = (
    "Megatron-LM's rules are not run, because megatron/training/arguments.py is neither near the program nor in "
    "PYTHONPATH nor installed; give --checkout FOLDER"
)


def plan_of_launched(request: Request, command: LaunchedCommand, rules: RuleOptions) -> ActivationPlan:
    """The plan of a training command that was found. Raises MindSpeedError with every problem."""
    from mindspeed.problems import MindSpeedError

    ((plan, *_),) = plans_of_launched(request, [command], rules)
    if isinstance(plan, MindSpeedError):
        raise plan
    return plan


def plans_of_launched(
    request: Request, commands: Sequence[LaunchedCommand], rules: RuleOptions
) -> list[tuple[ActivationPlan | MindSpeedError, list[Trap], str]]:
    """Return for each training command its plan, or the error with every problem, its traps, and who judges it."""
    from mindspeed.workbench.lint.upstream.process import RulesProcess, find_checkout

    found = [None if rules.static else find_checkout(command.program, os.environ, rules.checkout) for command in commands]
    first = next(filter(None, found), None)
    child = RulesProcess(first.folder, rules.arch) if first is not None else None  # works during the imports below
    from mindspeed.workbench.lint.judgement import check_jobs

    jobs = [_job(request, *named, rules) for named in zip(commands, found, strict=True)]
    checked = check_jobs(jobs, rules.arch, request.layers, child)
    return [(plan, traps, job.judge) for (plan, traps), job in zip(checked, jobs, strict=True)]


def _job(request: Request, command: LaunchedCommand, found: Checkout | None, rules: RuleOptions) -> CheckedJob:
    """Return a command with the environment and the Megatron-LM that it will have."""
    from mindspeed.platforms import detect
    from mindspeed.workbench.lint.judgement import CheckedJob

    *_, command_line = request.layers
    environment = request.environment(command_line.world.get("world_size"))
    if environment.platform == "cuda" and detect() != "cuda":
        environment = replace(environment, engine=True)  # as on every machine with Megatron's default layers
    if rules.checkout is not None and found is None and not rules.static:
        raise click.UsageError(f"{rules.checkout} does not contain megatron/training/arguments.py")
    if found is not None and found.version is not None:
        if request.megatron is None:
            environment = replace(environment, megatron=found.version)
        elif rules.checkout is None and request.megatron != found.version:
            versions = f"the plan is for Megatron {request.megatron}, but {found.source} has {found.version}"
            text = f"Megatron-LM's rules are not run: {versions}"
            return CheckedJob(command, environment, None, text)
    if found is not None or rules.static:
        return CheckedJob(command, environment, found, "")
    missing = f"{command.program} does not exist here. " if command.starts_a_missing_file() else ""
    return CheckedJob(command, environment, None, missing + _NO_RULES)
