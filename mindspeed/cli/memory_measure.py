"""``mindspeed memory measure``: predicted bytes compared with those of a run, or of a dry run of a job of any size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import click

from mindspeed import registry
from mindspeed.cli.output import PROBLEMS, end, json_option, print_json, print_table, wants_json
from mindspeed.cli.request_options import COMMAND_LINE, JobCommand, Request, names_argument, request_options
from mindspeed.memory_planner.plans import repeats, stages_of
from mindspeed.problems import Fix, Problem, ResolutionError

if TYPE_CHECKING:
    from mindspeed.memory_planner.stages import Stage
    from mindspeed.workbench.verification.case import VerificationCase


PEAK: Final = "peak of a step"
TOLERANCE: Final = 0.05
DRY_PEAK: Final = 0.1
"""A dry run has temporary tensors of few micro-batches beside what it keeps."""


@click.command(cls=JobCommand)
@names_argument("[NAME]...")
@click.option(
    "--nproc", type=click.IntRange(1), metavar="N", help="Number of processes  [default: the fewest that the features need]"
)
@click.option(
    "--dry-run",
    "dry",
    is_flag=True,
    help="Train with fake tensors in one process: no weights are allocated, and --world-size may be any number",
)
@request_options
@json_option
def measure(request: Request, names: tuple[str, ...], nproc: int | None, dry: bool) -> None:
    """Train a small model with features and compare its memory with the estimate.

    Compares the bytes that one micro-batch keeps for backward, and the peak of a training step, on the rank with the most
    memory. With --dry-run the requested model is built and trained with fake tensors, one rank per stage. The exit status is 1
    when an estimate differs from its measured value by more than 5 %. With --dry-run, the limit for peaks is 10 %.
    """
    from mindspeed.workbench.verification.case import build_case, with_few_micro_batches
    from mindspeed.workbench.verification.pool import WorkerPool
    from mindspeed.workbench.verification.shape import not_built

    layers = request.layers
    given = {name: value for layer in layers for name, value in layer.world.items()}
    if problems := [_not_built(name, given[name]) for name in not_built(given)]:
        raise ResolutionError(problems)
    case = build_case(names, layers, [], nproc, request.environment())
    if dry:
        case = build_case(names, [*layers, with_few_micro_batches(case.plan.world)], [], nproc, request.environment())
    foretold = stages_of(case.plan, registry.catalog(), case.recipe.shape.dropout > 0)
    with WorkerPool() as pool:
        if dry:
            found = pool.dry_run(case.plan, case.recipe)
            rows: dict[str, tuple[int, int]] = {}
            for stage, measured in zip(foretold, found, strict=True):
                pairs = compared(case, [stage], [measured])
                rows |= {f"stage {stage.stage}: {name}": pair for name, pair in pairs.items()}
        else:
            rows = compared(case, foretold, pool.measure(case.plan, case.recipe, int(case.plan.world.world_size)))
    if wants_json():
        errors = {name: {"predicted": p, "measured": m, "error": p / m - 1} for name, (p, m) in rows.items()}
        data = {name.replace(":", "").replace(" ", "_"): row for name, row in errors.items()}
        print_json({"features": list(case.plan.names), **data, "accurate": accurate(rows, dry)})
    else:
        table = [(name, f"{p:,}", f"{m:,}", f"{p / m - 1:+.1%}") for name, (p, m) in rows.items()]
        print_table(("bytes", "predicted", "dry run" if dry else "measured", "error"), table)
    end(0 if accurate(rows, dry) else PROBLEMS)


def _not_built(name: str, value: Any) -> Problem:
    text = f"{name} is {value}, but mindspeed memory measure cannot build such a model"
    return Problem("MS301", text, where=COMMAND_LINE, fix=Fix.drop_field(name))


def compared(case: VerificationCase, foretold: list[Stage], results: list[tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """The largest predicted bytes of stages and the largest measured bytes of ranks."""
    kept, peaks = zip(*results, strict=True)
    rows = {PEAK: (max(stage.peak for stage in foretold), max(peaks))}
    if repeats(case.plan, registry.catalog()):
        return rows
    return {"activations of a micro-batch": (max(stage.activations for stage in foretold), max(kept)), **rows}


def accurate(rows: Mapping[str, tuple[int, int]], dry: bool = False) -> bool:
    """Return whether every prediction is as close to what was measured as the planner claims."""
    limits = {name: DRY_PEAK if dry and name.endswith(PEAK) else TOLERANCE for name in rows}
    return all(abs(predicted / measured - 1) <= limits[name] for name, (predicted, measured) in rows.items())
