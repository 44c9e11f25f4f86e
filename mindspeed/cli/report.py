"""``mindspeed report``: the page of a run of ``mindspeed pretrain`` or of Megatron-LM."""

from __future__ import annotations

from pathlib import Path

import click

from mindspeed.cli.output import FOLDER, json_option, print_json, print_table, wants_json, write_page


@click.command()
@click.argument("run", type=FOLDER)
@click.option("--baseline", type=FOLDER, metavar="RUN", help="Folder of another run, whose curves are drawn below those of RUN")
@click.option(
    "--html",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="File of the report  [default: report.html in the folder of RUN]",
)
@json_option
def report(run: Path, baseline: Path | None, html: Path | None) -> None:
    """Write the report of a run: curves, times, memory, schedule and patches as one HTML page.

    mindspeed report runs/a

    mindspeed report runs/b --baseline runs/a

    RUN is a folder with log.jsonl: that of mindspeed pretrain, or of a run of Megatron-LM with a feature that logs each
    step. The run may still be running. The page has times by section, memory over a step and the pipeline schedule if
    such a feature has recorded a step.
    """
    from mindspeed.workbench.training.run_numbers import HEADERS, read_run, rows_of
    from mindspeed.workbench.training.run_page import PAGE, report_page

    other = read_run(baseline) if baseline is not None else None
    numbers = read_run(run, against=other)
    file = html or run / PAGE
    write_page(file, report_page(run, other))
    if wants_json():
        print_json({"page": str(file), **numbers.to_json()})
        return
    print_table(HEADERS, rows_of([numbers] if other is None else [other, numbers]))
    click.echo(f"page: {file}")
