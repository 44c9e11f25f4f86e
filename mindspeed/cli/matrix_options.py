"""Options and progress lines of the commands that judge cases of the matrix."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mindspeed.cli.output import Amount, wants_json

if TYPE_CHECKING:
    from mindspeed.workbench.verification.matrix.run import Progress

store_option = click.option(
    "--store", type=click.Path(path_type=Path), metavar="FILE", help="File in which test results are stored"
)
budget_option = click.option(
    "--budget-seconds", type=Amount(0), metavar="S", help="Start no further test after this many seconds"
)


def show_progress(progress: Progress) -> None:
    """Print the verdict that was just found, and how long the rest will take."""
    if wants_json() and not sys.stderr.isatty():
        return
    result = progress.result
    left = f"{progress.seconds_left / 60:.0f} min left"
    words = (f"{progress.done}/{progress.total}", left, f"{result.outcome.value:<12}", result.case.name)
    click.echo("  ".join((*words, f"{result.code} {result.reason}".strip())).rstrip(), err=True)
