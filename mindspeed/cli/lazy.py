"""A click group that imports a verb when it is used, and turns problems into text and exit codes."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from gettext import gettext
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn

import click

from mindspeed.cli.language import bind_catalogues, translated
from mindspeed.problems import MindSpeedError, near_names, suggestion
from mindspeed.process.gc_pause import collector_paused

if TYPE_CHECKING:
    from mindspeed.plugins.extensions import Extension


class Group(click.Group):
    """Verbs in the order of their declaration; an unknown verb is refused with similar names.

    ``lazy`` maps a verb to the ``"module:attribute"`` of its command. Verbs of ``developer`` have a heading in the help, as
    have those that packages add by the group ``entry_points``.
    """

    def __init__(
        self,
        name: str | None = None,
        lazy: Mapping[str, str] | None = None,
        developer: Sequence[str] = (),
        entry_points: str = "",
        **options: Any,
    ) -> None:
        super().__init__(name, **options)
        self.lazy = lazy or {}
        self.developer = developer
        self.entry_points = entry_points

    def added(self) -> dict[str, list[Extension]]:
        """Return the verbs of packages, each with those that provide it; none is imported."""
        if not self.entry_points:
            return {}
        from mindspeed.plugins.extensions import extensions

        found: dict[str, list[Extension]] = {}
        for extension in extensions(self.entry_points):
            found.setdefault(extension.name, []).append(extension)
        return found

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(dict.fromkeys((*self.lazy, *self.commands, *self.added())))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        command = self._command(ctx, cmd_name)
        return command and translated(command)

    def _command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.lazy:
            providers = self.added().get(cmd_name)
            return _command_of(providers) if providers else super().get_command(ctx, cmd_name)
        module, _, attribute = self.lazy[cmd_name].partition(":")
        with collector_paused():
            command: click.Command = getattr(import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        verbs, added = self.list_commands(ctx), self.added()
        own = {verb: self.get_command(ctx, verb) for verb in verbs if verb in self.lazy or verb not in added}
        sections: dict[str, list[tuple[str, click.Command | None]]] = {
            gettext("Commands"): [(verb, command) for verb, command in own.items() if verb not in self.developer],
            gettext("Commands for developers"): [(verb, own[verb]) for verb in self.developer],
            gettext("Commands of other packages"): [
                (verb, _command_of(providers, verb in own)) for verb, providers in added.items()
            ],
        }
        limit = formatter.width - 6 - max(map(len, verbs), default=0)
        for title, commands in sections.items():
            if rows := [(verb, command.get_short_help_str(limit)) for verb, command in commands if command is not None]:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        if args and self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            verbs = self.list_commands(ctx)
            known = suggestion(near_names(args[0], verbs, cutoff=0.65), f"there are {', '.join(verbs)}")
            ctx.fail(f"no such command {args[0]!r}; {known}")
        return super().resolve_command(ctx, args)


def _command_of(providers: Sequence[Extension], is_built_in: bool = False) -> click.Command:
    """Import the verb of a package.

    Where that fails, or mindspeed or several packages provide one of its name, the problem is what the verb does.
    """
    extension = providers[0]
    try:
        if is_built_in:
            raise extension.broken("MS102", "has the name of a command of mindspeed")
        if len(providers) > 1:
            named = " and ".join(f"{one.distribution} {one.version}" for one in providers)
            raise extension.broken("MS102", f"is not the only command of its name: {named} provide it")
        command = extension.load()
        if isinstance(command, click.Command):
            return command
        raise extension.broken("MS101", f"is no command of click, but a {type(command).__name__}")
    except MindSpeedError as error:
        problem = error

    def refuse() -> NoReturn:
        raise problem

    takes_anything = {"ignore_unknown_options": True, "allow_extra_args": True}
    row = f"{problem.problems[0].code}: not available ({', '.join(f'{one.distribution} {one.version}' for one in providers)})"
    return click.Command(extension.name, takes_anything, refuse, add_help_option=False, short_help=row)


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
        from mindspeed.cli.ending import open_closed_streams

        open_closed_streams()
        bind_catalogues()
        return click.Command.main(translated(self), *args, **options)

    def invoke(self, ctx: click.Context) -> Any:
        from mindspeed.cli.ending import INTERRUPTED, is_of_click, status_of
        from mindspeed.cli.output import exit_code, print_problems
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

        tolerate_any_text()
        try:
            return super().invoke(ctx)
        except MindSpeedError as error:
            print_problems(error.problems, error.words)
            ctx.exit(exit_code(error.problems))
