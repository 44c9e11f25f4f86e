"""``mindspeed profile``: where the time of traced steps is spent."""

from __future__ import annotations

from pathlib import Path

import click

from mindspeed.cli.output import json_option, print_json, print_table, wants_json


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--top",
    default=10,
    show_default=True,
    metavar="N",
    help="Number of names to show of each kind (feature, operator, collective, wait); 0 = all",
)
@json_option
def profile(folder: Path, top: int) -> None:
    """Show where the time of traced steps is spent.

    The times are shown per feature, operator, collective and wait.

    FOLDER contains the traces, one per rank. The time of a feature is the time inside its patches and hooks. The time of an
    operator does not include the operators that it calls.
    """
    from mindspeed.plugins.found import installed
    from mindspeed.workbench.diagnostics.traces import KINDS, summarize_folder

    summaries = summarize_folder(folder, (row.name for row in installed()))
    if wants_json():
        print_json({"ranks": summaries})
        return
    for summary in summaries:
        steps = ", ".join(map(str, summary.steps)) or "none"
        click.echo(f"rank {summary.rank}: steps {steps}, {summary.seconds:.4f} s")
        rows = [
            (kind, name, f"{seconds:.4f}", f"{100 * seconds / summary.seconds:.1f} %" if summary.seconds else "", str(calls))
            for kind in KINDS
            for name, (seconds, calls) in list(summary.times[kind].items())[: top or None]
        ]
        print_table(("KIND", "NAME", "SECONDS", "OF STEPS", "CALLS"), rows)
