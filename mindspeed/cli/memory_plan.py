"""``mindspeed memory plan`` and ``pairs``: what each stage holds at its peak, and which features go together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from gettext import gettext
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from mindspeed.cli.output import (
    PROBLEMS,
    Amount,
    end,
    html_option,
    json_option,
    print_json,
    print_table,
    wants_json,
    write_page,
)
from mindspeed.cli.request_options import FullJobCommand, Request, names_argument, request_options
from mindspeed.cli.terminal import columns, rows_of_cells, wrapped
from mindspeed.job.arithmetic import shape_of_world
from mindspeed.memory.byte_count import MIB
from mindspeed.memory_planner.communicators import communicator_lines
from mindspeed.memory_planner.plans import shares, stages_of
from mindspeed.memory_planner.stages import AT_PEAK, Row, Stage

if TYPE_CHECKING:
    from mindspeed.engine.planning.plan import ActivationPlan
    from mindspeed.plugins.discovery import Catalog

EXCLUSIVE: Final = {"MS202", "MS203"}
"""Problems of features that conflict, or that hold one slot."""
_OF_THE_JOB: Final = {"MS304"}
"""Problem of a feature's own condition, which reads its settings and the job: it remains whatever other features are added."""
_SMALLEST_BAR: Final = 5
_LARGEST: Final = 8
"""Rows of the fullest stage that are listed."""
_TENSORS: Final = ("tensor", "MiB", "live", "at the peak", "held", "by")
_KEYS: Final = ("name", "bytes", "live", "held", "by")


@click.command(cls=FullJobCommand)
@names_argument("[NAME]...")
@click.option("--budget-mib", type=Amount(0, min_open=True), metavar="MIB", help="Device memory of a rank in MiB")
@click.option("--dropout/--no-dropout", help="Assume that the model uses dropout  [default: no]")
@click.option("--all", "whole", is_flag=True, help="Show every tensor of every stage")
@html_option("a memory bar for each stage, and a table of its tensors,")
@request_options
@json_option
def plan(
    request: Request, names: tuple[str, ...], budget_mib: float | None, dropout: bool, whole: bool, html: Path | None
) -> None:
    """Estimate the peak memory of each pipeline stage.

    The estimate covers weights, gradients, optimizer states and every tensor that layers keep for backward. Layers of
    Transformer Engine are counted as Megatron's local ones. Without --num-experts the model is dense. With --moe-layers the
    other layers are dense, and they come first. With --budget-mib the exit status is 1 when a stage does not fit. The features
    that make it fit at the lowest cost are printed.
    """
    from mindspeed.registry import catalog

    request = request.of_dense()
    made, known = request.naming(names).plan_of_run(), catalog()
    foretold = stages_of(made, known, dropout)
    fits = budget_mib is None or max(stage.peak for stage in foretold) <= budget_mib * MIB
    if html is not None:
        write_page(html, memory_page(foretold))
    cheapest = [] if fits or budget_mib is None else _cheapest(request, names, made, known, dropout, budget_mib)
    if wants_json():
        rows = [
            {"stage": s.stage, "rows": [{key: getattr(row, key) for key in _KEYS} for row in s.rows], "peak": s.peak}
            for s in foretold
        ]
        print_json({"stages": rows, "fits": fits, "cheapest": cheapest})
    else:
        click.echo("\n".join([*brief_lines(foretold), *_mixed_layers(made)]))
        for line in communicator_lines(made, known):
            click.echo("\n".join(wrapped(gettext("communicators of a rank: {line}").format(line=line))))
        for stage in foretold if whole else ():
            click.echo("\n" + gettext("stage {stage}: peak {peak} MiB").format(stage=stage.stage, peak=_mib(stage.peak)))
            print_table(_TENSORS, [_tensor(row) for row in stage.rows])
        if not fits:
            way = gettext("add --features {names}").format(names=",".join(cheapest))
            advice = way if cheapest else gettext("no combination of features makes it fit")
            template = gettext("the largest peak exceeds {budget:g} MiB; {advice}")
            click.echo(template.format(budget=budget_mib, advice=advice))
    end(0 if fits else PROBLEMS)


def brief_lines(stages: Sequence[Stage]) -> Iterator[str]:
    """Yield the largest peak, a line with a bar for each stage, and the largest tensors of the fullest stage."""
    most = max(stages, key=lambda stage: stage.peak)
    template = gettext("peak {peak} MiB on stage {stage} of {count}; values in MiB per rank")
    yield template.format(peak=_mib(most.peak), stage=most.stage, count=len(stages))
    texts = [(str(stage.stage), *map(_mib, shares(stage).values())) for stage in stages]
    titles = ("stage", *shares(most))
    widths = [max(map(len, column)) for column in zip(titles, *texts, strict=True)]
    room = min(columns() - sum(widths) - 2 * len(widths), 40)
    for cells, stage in zip((titles, *texts), (None, *stages), strict=True):
        bar = "#" * round(room * stage.peak / most.peak) if stage is not None and room >= _SMALLEST_BAR else ""
        yield f"{'  '.join(f'{cell:>{width}}' for cell, width in zip(cells, widths, strict=True))}  {bar}".rstrip()
    sizes = {row: row.bytes * row.live for row in most.rows if row.held in AT_PEAK}
    largest = sorted(sizes, key=lambda row: -sizes[row])[:_LARGEST]
    yield gettext("largest on stage {stage}").format(stage=most.stage)
    yield from rows_of_cells([(f"{_mib(sizes[row]):>{max(widths)}}", _described(row)) for row in largest])
    yield from wrapped(gettext("--all shows every tensor of every stage"))


def _mixed_layers(made: ActivationPlan) -> Iterator[str]:
    """Yield the order that the estimate assumes of dense and MoE layers, where a transformer has both."""
    counts = shape_of_world(made.world).counts
    if counts.mlp and counts.experts and not made.world.is_hybrid:
        template = gettext("of {layers} layers the first {dense} are counted as dense, the others as MoE layers")
        yield from wrapped(template.format(layers=counts.attention, dense=counts.mlp))


def memory_page(stages: Sequence[Stage]) -> str:
    """Return a page with a bar for each stage, and a table of its tensors."""
    from mindspeed.workbench.html_page import page, section, table
    from mindspeed.workbench.pictures.stage_memory import memory_bars

    tables = [section(f"Stage {s.stage}, tensors in MiB", table(_TENSORS, map(_tensor, s.rows))) for s in stages]
    return page("Memory of each rank at its peak", memory_bars(stages), *tables)


def _described(row: Row) -> str:
    return f"{row.name}{f', of {row.live} passes' if row.live > 1 else ''}{f' ({row.by})' if row.by else ''}"


def _tensor(row: Row) -> tuple[str, ...]:
    at_peak = _mib(row.bytes * row.live) if row.held in AT_PEAK else "-"
    return row.name, _mib(row.bytes), str(row.live), at_peak, row.held, row.by


def _cheapest(
    request: Request, names: Sequence[str], made: ActivationPlan, known: Catalog, dropout: bool, budget: float
) -> list[str]:
    """Return the features that make every stage fit and move the fewest bytes, none where nothing does."""
    from mindspeed.plugins.answers import implements
    from mindspeed.problems import MindSpeedError

    able = (name for name in sorted(known.usable) if implements(known.feature(name), "saved_tensors"))
    movers = [name for name in able if name not in made.names and known.specs[name].idle_size(made.world) is None]
    fitting: list[tuple[int, list[str]]] = []
    refused: list[set[str]] = []
    for added in (list(some) for count in range(1, len(movers) + 1) for some in combinations(movers, count)):
        if any(part.issubset(added) for part in refused):
            continue
        try:
            found = stages_of(request.plan_of_run((*names, *added), untried="none"), known, dropout)
        except MindSpeedError as error:
            lasting = EXCLUSIVE | _OF_THE_JOB if len(added) == 1 else EXCLUSIVE
            if lasting & {problem.code for problem in error.problems}:
                refused.append(set(added))
            continue
        if max(stage.peak for stage in found) <= budget * MIB:
            moved = sum(row.bytes * row.live for stage in found for row in stage.rows if row.held != "kept")
            fitting.append((moved, added))
    return min(fitting, default=(0, []))[1]


def _mib(size: int) -> str:
    return f"{size / MIB:,.1f}"


@click.command(cls=FullJobCommand)
@names_argument("NAME NAME...")
@request_options
@json_option
def pairs(request: Request, names: tuple[str, ...]) -> None:
    """Show for each pair of memory features whether a job can use both, and why not."""
    names, request = request.subject(names)
    rows = [(first, second, _refusal(request, first, second)) for first, second in combinations(sorted(set(names)), 2)]
    if wants_json():
        print_json({"pairs": [{"features": [first, second], "refused": refusal} for first, second, refusal in rows]})
    else:
        print_table(("feature", "feature", "together"), [(first, second, refusal or "yes") for first, second, refusal in rows])


def _refusal(request: Request, first: str, second: str) -> str:
    """The problems of a pair, none where both can be active."""
    from mindspeed.problems import MindSpeedError

    try:
        request.naming((first, second)).plan_of_run()
    except MindSpeedError as error:
        return "; ".join(problem.message for problem in error.problems)
    return ""
