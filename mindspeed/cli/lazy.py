"""A click group that imports a verb when it is used, and turns problems into text and exit codes."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import click

from mindspeed.problems.near_names import near_names, suggestion
from mindspeed.process.gc_pause import collector_paused


class Group(click.Group):
    """Verbs in the order of their declaration; an unknown verb is refused with similar names.

    ``lazy`` maps a verb to the ``"module:attribute"`` of its command. Verbs of ``developer`` have a heading in the help.
    """

    def __init__(
        self, name: str | None = None, lazy: Mapping[str, str] | None = None, developer: Sequence[str] = (), **options: Any
    ) -> None:
        super().__init__(name, **options)
        self.lazy = lazy or {}
        self.developer = developer

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self.lazy, *self.commands]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.lazy:
            return super().get_command(ctx, cmd_name)
        module, _, attribute = self.lazy[cmd_name].partition(":")
        with collector_paused():
            command: click.Command = getattr(import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        verbs = self.list_commands(ctx)
        sections = {
            "Commands": [verb for verb in verbs if verb not in self.developer],
            "Commands for developers": [verb for verb in verbs if verb in self.developer],
        }
        limit = formatter.width - 6 - max(map(len, verbs), default=0)
        for title, members in sections.items():
            commands = [(verb, self.get_command(ctx, verb)) for verb in members]
            if rows := [(verb, command.get_short_help_str(limit)) for verb, command in commands if command is not None]:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        verbs = self.list_commands(ctx)
        if args and args[0] not in verbs and not args[0].startswith("-"):
            known = suggestion(near_names(args[0], verbs, cutoff=0.65), f"there are {', '.join(verbs)}")
            ctx.fail(f"no such command {args[0]!r}; {known}")
        return super().resolve_command(ctx, args)


class Main(Group):
    """The root group: whatever ends a verb is printed as problems, never as a traceback.

    Output that cannot be written ends a verb too: with a sentence, or without one where the reader of a pipe has gone.
    With ``MINDSPEED_TRACE=1`` the traceback of an error comes before its problem.
    """

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Run as the program of a process, which ends at once where a verb has imported torch."""
        try:
            return super().__call__(*args, **options)
        except SystemExit as end:
            if "torch" in sys.modules and isinstance(end.code, int | None):
                from mindspeed.engine.runtime.launch import end_process

                end_process(end.code or 0)
            raise

    def main(self, *args: Any, **options: Any) -> Any:
        from mindspeed.cli.streams import open_closed_streams

        open_closed_streams()
        return super().main(*args, **options)

    def invoke(self, ctx: click.Context) -> Any:
        from mindspeed.cli.last_handler import INTERRUPTED, is_of_click
        from mindspeed.cli.output import exit_code, print_problems
        from mindspeed.cli.streams import status_of
        from mindspeed.engine.runtime.uncaught import unforeseen

        try:
            return self._invoke(ctx)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(INTERRUPTED)
        except BaseException as error:
            if is_of_click(error):
                raise
            status = status_of(error) if isinstance(error, OSError) else None
            if status is None:
                problem = unforeseen(error)
                print_problems([problem])
                status = exit_code([problem])
            ctx.exit(status)

    def _invoke(self, ctx: click.Context) -> Any:
        from mindspeed.cli.output import exit_code, print_problems
        from mindspeed.cli.terminal import tolerate_any_text
        from mindspeed.problems.problem import MindSpeedError

        tolerate_any_text()
        try:
            return super().invoke(ctx)
        except MindSpeedError as error:
            print_problems(error.problems, error.words)
            ctx.exit(exit_code(error.problems))
