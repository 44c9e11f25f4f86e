"""Print the output of verbs: JSON or a page on request, problems on standard error, tables that suit the terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from gettext import gettext
from pathlib import Path
from shutil import which
from typing import Any, Final, NoReturn, TypeVar

import click

from mindspeed.cli.language import reader
from mindspeed.cli.terminal import display_width, padded
from mindspeed.problems import CommandLine, Problem, localized, on_command_line

OK: Final = 0
PROBLEMS: Final = 1
ENVIRONMENT: Final = 3

FOLDER: Final = click.Path(path_type=Path)
"""The type of an option or argument that names a folder."""
_JSON: Final = "mindspeed.json"
_STDOUT: Final = "mindspeed.stdout"


class Amount(click.FloatRange):
    """A number in a range; nan is outside of every range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if number != number:
            self.fail(f"{value} is not in the range {self._describe_range()}.", param, ctx)
        return number


Command = TypeVar("Command", bound=Callable[..., Any])


def json_option(command: Command) -> Command:
    """Add ``--json``; the verb asks `wants_json`, and problems of the verb are then printed as JSON too.

    What other code prints meanwhile, such as a package that is imported, goes to standard error.
    """

    def remember(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
        ctx.meta[_JSON] = value
        if value:
            ctx.meta[_STDOUT] = sys.stdout
            ctx.find_root().with_resource(redirect_stdout(sys.stderr))

    return click.option(
        "--json",
        is_flag=True,
        expose_value=False,
        is_eager=True,
        callback=remember,
        help="Print one JSON object and nothing else",
    )(command)


def html_option(what: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add ``--html FILE``, which writes ``what`` as a page; the function gets it as ``html``."""
    kind = click.Path(dir_okay=False, path_type=Path)
    return click.option("--html", type=kind, metavar="FILE", help=f"Also write {what} as one HTML page")


def write_page(file: Path, text: str) -> None:
    """Write a page. Raises PlatformError (MS516) for a place that cannot be written."""
    from mindspeed.files.text_files import write_files

    write_files({file: text}, fix="choose another --html FILE")


def wants_json() -> bool:
    """Return whether the running verb was given ``--json``."""
    return bool(click.get_current_context().meta.get(_JSON))


def program() -> str:
    """Return how this command is reached from here: its name where the shell finds it, else its path."""
    path = sys.argv[0]
    return path if Path(path).name == "mindspeed" and which("mindspeed") is None else "mindspeed"


def print_json(data: dict[str, Any]) -> None:
    """Print a JSON object to standard output, which holds nothing else."""
    print_alone(json.dumps(data, indent=2, ensure_ascii=False, default=_as_json))


def print_alone(text: str) -> None:
    """Print the only text that standard output holds under ``--json``."""
    click.echo(text, file=click.get_current_context().meta.get(_STDOUT))


def _as_json(value: Any) -> dict[str, Any]:
    """Return a value of ours for JSON: as it says itself, else its fields."""
    data: dict[str, Any] = value.to_json() if hasattr(value, "to_json") else asdict(value)
    return data


def print_result(data: dict[str, Any], lines: Iterable[str]) -> None:
    """Print ``data`` under ``--json``, else the lines."""
    if wants_json():
        print_json(data)
    else:
        for line in lines:
            click.echo(line)


def print_problems(problems: Sequence[Problem], words: CommandLine = on_command_line) -> None:
    """Print problems: ``{"problems": [...], "plan": null}`` under ``--json``, else text on standard error.

    ``words`` says their fixes, as `MindSpeedError.words` does.
    """
    if wants_json():
        print_json({"problems": [problem.to_json(words) for problem in problems], "plan": None})
        return
    words = reader(words)
    for problem in problems:
        click.echo(problem.text(words), err=True)
    if len(problems) > 1:
        click.echo(gettext("{count} problems").format(count=len(problems)), err=True)
    if sys.stderr.isatty() and problems:
        codes = dict.fromkeys(problem.code for problem in problems)
        click.echo(words.say("more about it: {names}", *(f"mindspeed explain {code}" for code in list(codes)[:3])), err=True)


def exit_code(problems: Iterable[Problem]) -> int:
    """0 without problems, 3 when all of them are about the environment (MS5xx), else 1."""
    of_environment = [problem.code.startswith("MS5") for problem in problems]
    if not of_environment:
        return OK
    return ENVIRONMENT if all(of_environment) else PROBLEMS


def end(status: int) -> NoReturn:
    """End the running verb with an exit status."""
    click.get_current_context().exit(status)


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Aligned columns, one line per row; on a terminal as wide as that, with a bold head and cells that are wrapped.

    Headers are in the reader's language.
    """
    headers = [*map(localized, headers)]
    if sys.stdout.isatty():
        _print_on_terminal(headers, rows)
        return
    widths = [max(display_width(row[column]) for row in (headers, *rows)) for column in range(len(headers))]
    for row in (headers, *rows):
        click.echo("  ".join(map(padded, row, widths)).rstrip())


def _print_on_terminal(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for number, header in enumerate(headers):
        table.add_column(header, overflow="fold", no_wrap=number == 0)
    for row in rows:
        table.add_row(*map(Text, row))
    Console(highlight=False).print(table)
