"""Help of verbs that take a job: their own options first, those of every job in sections of their own."""

from __future__ import annotations

from typing import Final

import click


class JobOption(click.Option):
    """An option that every verb with a job has."""


class SizeOption(JobOption):
    """A size of the job or a part of the model's shape."""


class JobCommand(click.Command):
    """A verb with a job. The sizes, about thirty, are listed by `FullJobCommand` alone."""

    lists_sizes = False

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {title: [] for title in _TITLES.values()}
        for parameter in self.get_params(ctx):
            if isinstance(parameter, click.Argument):
                continue
            title = next(title for kind, title in _TITLES.items() if isinstance(parameter, kind))
            if (row := parameter.get_help_record(ctx)) is not None:
                sections[title].append(row)
        if not self.lists_sizes:
            names = ", ".join(row[0].split()[0].partition("/")[0] for row in sections[_SIZES][:4])
            sections[_SIZES] = [(f"{names} ...", f"{len(sections[_SIZES])} options: mindspeed features check --help")]
        for title in reversed(sections):
            if rows := sections[title]:
                with formatter.section(title):
                    formatter.write_dl(rows)


class FullJobCommand(JobCommand):
    """A verb whose help lists the sizes as well."""

    lists_sizes = True


_SIZES: Final = "Sizes of the job and shape of the model"
_TITLES: Final[dict[type[click.Option], str]] = {
    SizeOption: _SIZES,
    JobOption: "Job",
    click.Option: "Options",
}
