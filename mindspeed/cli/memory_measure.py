"""``mindspeed memory measure``: the planner's activation bytes beside those of a run."""

from __future__ import annotations

import click

from mindspeed.cli.output import json_option, print_json, print_table, wants_json
from mindspeed.cli.request_options import FeatureName, JobCommand, Request, request_options
from mindspeed.diagnostics.job_memory import options_of, repeats, stages_of


@click.command(cls=JobCommand)
@click.argument("names", metavar="[NAME]...", nargs=-1, required=True, type=FeatureName())
@click.option("--nproc", type=click.IntRange(1), metavar="N", help="processes  [default: the fewest that the features need]")
@request_options
@json_option
def measure(request: Request, names: tuple[str, ...], nproc: int | None) -> None:
    """Train a tiny model with features, and compare its memory with what was foretold.

    The bytes that one micro-batch keeps for backward, and those at the peak of a training step, on the rank that has most.
    """
    from mindspeed.verification.case import build_case
    from mindspeed.verification.pool import WorkerPool

    case = build_case(names, request.layers, [], nproc, request.environment())
    foretold = stages_of(case.plan, options_of(case.plan, dropout=case.recipe.shape.dropout > 0))
    with WorkerPool() as pool:
        results = pool.measure(case.plan, case.recipe, int(case.plan.world.world_size))
    kept, peaks = zip(*results, strict=True)
    rows = {"peak of a step": (max(stage.peak for stage in foretold), max(peaks))}
    if not repeats(case.plan):
        rows = {"activations of a micro-batch": (max(stage.activations for stage in foretold), max(kept)), **rows}
    if wants_json():
        data = {name.replace(" ", "_"): {"predicted": p, "measured": m, "error": p / m - 1} for name, (p, m) in rows.items()}
        print_json({"features": list(case.plan.names), **data})
    else:
        table = [(name, f"{p:,}", f"{m:,}", f"{p / m - 1:+.1%}") for name, (p, m) in rows.items()]
        print_table(("bytes", "predicted", "measured", "error"), table)
