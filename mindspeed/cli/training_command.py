"""A training command as the job of a verb: words after ``--``, or a script with ``--script``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

import click

from mindspeed.cli.request_options import FullJobCommand, JobCommand, Request

if TYPE_CHECKING:
    from mindspeed.engine.planning.plan import ActivationPlan

_WORDS: Final = "mindspeed.training_command"


class PlansCommands(JobCommand):
    """A verb that takes a training command behind ``--``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            ctx.meta[_WORDS] = args[at + 1 :]
            args = args[:at]
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- COMMAND ...]"]


class PlansCommandsFully(PlansCommands, FullJobCommand):
    """Such a verb whose help lists the sizes as well."""


script_option = click.option(
    "--script", metavar="FILE", help="plan the training command of this shell script, or of a launcher's JSON file"
)


def plan_of_command(request: Request, script: str | None) -> ActivationPlan | None:
    """The plan of a training command with the rest of a request; None where the request names no command.

    Raises MindSpeedError with every problem.
    """
    words: list[str] | None = click.get_current_context().meta.get(_WORDS)
    if words is None and script is None:
        return None
    if words is not None and script is not None:
        raise click.UsageError("--script and a command after -- are two commands; give one")
    from mindspeed.megatron_lm.dry_run import plan_command
    from mindspeed.megatron_lm.launched_command import command_of_file, command_of_words

    command = command_of_file(script, os.environ) if script is not None else command_of_words(words or ())
    *below, command_line = request.layers
    size = command_line.world.get("world_size")
    return plan_command(command, request.environment(size), below, [command_line])
