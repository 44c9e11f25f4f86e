"""``mindspeed schedule``: pipeline schedules as lists of operations, judged before anything runs."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import click

from mindspeed.cli.lazy import Group
from mindspeed.cli.output import Amount, html_option, json_option, print_result, write_page
from mindspeed.pipeline.operations import Costs, Duration, PipelineShape, Placement, Schedule
from mindspeed.problems import Fix, MindSpeedError, Problem

if TYPE_CHECKING:
    from mindspeed.pipeline.drawing import Timeline


@click.group(cls=Group)
def schedule() -> None:
    """Show pipeline schedules: operations, bubbles and memory."""


@schedule.command()
@click.option(
    "--schedule",
    "name",
    required=True,
    metavar="NAME",
    help="Name of a schedule, of a feature that provides one, or of a file that --json wrote",
)
@click.option("--pp", type=click.IntRange(1), default=4, show_default=True, help="Number of pipeline ranks")
@click.option(
    "--vpp", type=click.IntRange(1), help="Number of model chunks per rank  [default: 1, or 2 for V-shaped schedules]"
)
@click.option("--micro-batches", type=click.IntRange(1), default=16, show_default=True, help="Number of micro-batches per step")
@click.option(
    "--group",
    type=click.IntRange(1),
    help="Number of micro-batches in a row per model chunk (microbatch_group_size_per_vp_stage)  [default: pp]",
)
@click.option(
    "--cost",
    default="1:1:1:1",
    show_default=True,
    metavar="F:B:W:R",
    help="Durations of forward, input gradient, weight gradient and recomputation for one model chunk, all in the same unit "
    "of your choice. Each is one number, or numbers separated by commas, one per pipeline stage",
)
@click.option(
    "--hop",
    type=Amount(0),
    default=0.0,
    show_default=True,
    help="Duration of a message between two ranks, in the unit of --cost. With the default --cost, the forward pass of "
    "one model chunk takes 1 unit",
)
@click.option("--weights", metavar="W,...", help="Factors by which --cost is multiplied, one per pipeline stage")
@click.option(
    "--recompute",
    type=click.Choice(("none", "backward", "all", "least")),
    default="none",
    help="Where activations are recomputed: none; backward = within each backward pass; all = in a separate step before each "
    "backward pass. least = such a step only where --limit (maximum of kept activations) requires it",
)
@click.option("--limit", type=click.IntRange(1), help="Maximum number of forward passes whose activations a rank keeps")
@click.option(
    "--set",
    "assignments",
    metavar="FEATURE.FIELD=VALUE",
    multiple=True,
    help="Value of a setting of the feature whose schedule is shown (--schedule); may be repeated",
)
@click.option("--svg", "picture", type=click.Path(dir_okay=False, path_type=Path), help="Write the timeline to a file")
@click.option(
    "--trace",
    "traces",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    multiple=True,
    help="Trace of a run, one file per rank; its operations are drawn below the planned ones",
)
@html_option("timeline and costs")
@json_option
def show(
    name: str,
    pp: int,
    vpp: int | None,
    micro_batches: int,
    group: int | None,
    cost: str,
    hop: float,
    weights: str | None,
    recompute: str,
    limit: int | None,
    assignments: tuple[str, ...],
    picture: Path | None,
    traces: tuple[Path, ...],
    html: Path | None,
) -> None:
    """Show the timeline, bubbles and kept activations of a schedule.

    F is forward, B input gradient, W weight gradient, D both gradients, R recompute. Upper-case letters are the model
    chunks 0, 2 and so on of a rank, lower-case letters are the chunks 1, 3 and so on. The makespan is the time of a step.
    The floor is a lower bound: no order of these operations on this placement of stages is shorter. With --limit, it is the
    lower bound of schedules that keep the limit. The period is the time of a step if no rank waits for others between two
    steps. An activation set is the activations of one micro-batch in one model chunk.

    mindspeed schedule show --schedule interleaved --pp 4 --vpp 2 --micro-batches 16
    """
    from mindspeed.pipeline.drawing import as_svg, as_text, read_traces
    from mindspeed.pipeline.simulator import judge, period

    costs = _costs(cost, hop, weights)
    if recompute == "backward":
        costs = costs.with_recompute_in_backward()
    planned, limit = _planned(name, (pp, vpp, micro_batches, group), costs, recompute, limit, assignments)
    verdict = judge(planned, costs, limit)
    if verdict.problems:
        fix = Fix.advise("change the order of operations, or use another --schedule")
        raise MindSpeedError([Problem("MS650", f"{planned.name}: {text}", where=name, fix=fix) for text in verdict.problems])
    repeated = period(planned, costs)
    timelines: list[tuple[str, Timeline]] = [(f"{planned.name}: planned", verdict.spans)]
    if traces:
        timelines.append(("recorded", read_traces([trace.read_text("utf-8") for trace in traces])))
    if picture is not None:
        picture.write_text(as_svg(timelines), "utf-8")
    shape = planned.shape
    sizes = f"pp {shape.pp}, vpp {shape.vpp}, {shape.micro_batches} micro-batches"
    lines = [f"{planned.name}: {sizes}, placement {shape.placement}"]
    for title, timeline in timelines:
        lines += ["", *([title] if traces else []), *as_text(timeline)]
    bounded = "" if limit is None else f" with at most {limit} activation sets"
    costs_of_ranks = [
        f"makespan {verdict.makespan:g}, floor {verdict.floor:g}{bounded}, bubble {verdict.bubble:.2%}",
        f"period of steps that overlap {repeated:g}",
        f"idle within each rank's span: {', '.join(f'{share:.2%}' for share in verdict.span_bubble)}",
        f"activation sets kept at most: {', '.join(map(str, verdict.peak))}",
    ]
    if html is not None:
        from mindspeed.workbench.html_page import page, paragraph, section

        timeline_section = section("Timeline", as_svg(timelines, width=None))
        write_page(html, page(lines[0], *map(paragraph, costs_of_ranks), timeline_section))
    lines += ["", *costs_of_ranks]
    print_result(planned.to_json() | {"cost": costs.to_json(), "period": round(repeated, 9)} | verdict.to_json(), lines)


def _costs(cost: str, hop: float, weights: str | None) -> Costs:
    try:
        numbers = [tuple(map(float, words.split(","))) for words in cost.split(":")]
        factors = tuple(map(float, weights.split(","))) if weights else (1.0,)
    except ValueError as error:
        raise click.BadParameter(
            f"{error}; durations have the form F:B:W or F:B:W:R", param_hint="--cost or --weights"
        ) from error
    if not 3 <= len(numbers) <= 4 or min(map(min, (*numbers, factors))) < 0:
        text = f"{cost} does not have the form F:B:W or F:B:W:R with durations of at least 0"
        raise click.BadParameter(text, param_hint="--cost")
    forward, gradient, weight, again = (_by_stage(duration, factors) for duration in (*numbers, numbers[0])[:4])
    return Costs(forward, gradient, weight, again, hop)


def _by_stage(durations: tuple[float, ...], factors: tuple[float, ...]) -> Duration:
    """Return the products of durations and factors, each one for all stages or one per stage."""
    stages = max(len(durations), len(factors))
    if {len(durations), len(factors)} > {1, stages}:
        raise click.BadParameter(f"{len(durations)} durations and {len(factors)} weights are given", param_hint="--weights")
    products = tuple(durations[stage % len(durations)] * factors[stage % len(factors)] for stage in range(stages))
    return products if stages > 1 else products[0]


def _planned(
    name: str,
    sizes: tuple[int, int | None, int, int | None],
    costs: Costs,
    recompute: str,
    limit: int | None,
    assignments: tuple[str, ...],
) -> tuple[Schedule, int | None]:
    """Return the schedule of a file, of a name of the library or of a feature that plans one, and the limit that it keeps."""
    from mindspeed.pipeline.recomputation import LimitTooSmallError
    from mindspeed.pipeline.search import NAMES, named
    from mindspeed.pipeline.simulator import peak_sets

    pp, vpp, micro_batches, group = sizes
    kind: Any = "none" if recompute == "backward" else recompute  # which is of the costs
    options = _Options(limit, None if kind == "none" else kind)
    try:
        if name.endswith(".json"):
            planned = Schedule.from_json(json.loads(Path(name).read_text("utf-8")))
            _need_costs_of_all_stages(costs, planned.shape)
        else:
            feature = None if name in NAMES else _feature(name, assignments, options)
            placement: Placement = NAMES[name] if feature is None else getattr(feature, "placement", lambda: "loop")()
            shape = PipelineShape(pp, vpp or (2 if placement == "v" else 1), micro_batches, placement, group)
            _need_costs_of_all_stages(costs, shape)
            if feature is None:
                planned = named(name, shape, costs, kind, limit)
            else:
                _require_sizes(feature, shape)
                limit = getattr(feature.args, "limit", None)
                planned = cast("Schedule", feature.planned_schedule(shape, costs))
        if limit is not None and (peak := max(map(peak_sets, planned.ops))) > limit:
            raise LimitTooSmallError(limit, peak)
    except LimitTooSmallError as error:
        raise MindSpeedError([Problem("MS650", f"{name}: {error}", fix=Fix.advise(f"--limit {error.least}"))]) from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        fix = Fix.advise(f"--schedule with one of {', '.join(NAMES)}, a feature or a file, and sizes that it supports")
        raise MindSpeedError([Problem("MS650", f"{name}: {reason}", fix=fix)]) from error
    return planned, limit


def _need_costs_of_all_stages(costs: Costs, shape: PipelineShape) -> None:
    """Raise ValueError if a kind of operation has costs of another number of stages."""
    for durations in (costs.F, costs.B, costs.W, costs.R):
        if isinstance(durations, tuple) and len(durations) != shape.stages:
            raise ValueError(f"costs of {len(durations)} stages are given, but there are {shape.stages} stages")


def _require_sizes(feature: Any, shape: PipelineShape) -> None:
    """Raise MS304 with each condition of a feature that does not hold of the sizes of a schedule, with experts on two ranks."""
    from mindspeed.job.world import UnknownValue, World
    from mindspeed.plugins.conditions import conditions, failure

    name, found = feature.spec.name, list[Problem]()
    sizes = {"world_size": 2 * shape.pp, "pp": shape.pp, "vpp": shape.vpp, "ep": 2, "micro_batch_group": shape.group}
    world = World(sizes | {"micro_batch_size": 1, "global_batch_size": 2 * shape.micro_batches})
    for condition in conditions(feature.spec.constraints):
        if condition.otherwise == "refuse" and not condition.of:
            with suppress(UnknownValue):
                if failed := failure(condition, name, feature.args, world):
                    settings = tuple(fix for fix in failed.fix if fix.verb == "give-setting" and fix.value is not None)
                    fix = settings or Fix.advise("change --pp, --vpp or --micro-batches")
                    found.append(Problem("MS304", f"{name}: {failed.message}", (name,), fix=fix))
    if found:
        raise MindSpeedError(found)


class _Options(NamedTuple):
    """Options of the command line that are settings of a feature where they are given."""

    limit: int | None
    recompute: str | None


def _feature(name: str, assignments: tuple[str, ...], options: _Options) -> Any:
    """Return an instance of a feature that plans schedules. Raises MS201 with those that do for another name."""
    from mindspeed.engine.resolution.planned_feature import Value
    from mindspeed.engine.resolution.request import parse_assignments
    from mindspeed.engine.resolution.setting_validation import Arguments
    from mindspeed.job.world import World
    from mindspeed.pipeline.search import NAMES
    from mindspeed.registry import catalog_for

    known = catalog_for([name])
    able = [other for other in known.usable if hasattr(known.feature(other), "planned_schedule")]
    if name not in able:
        fix = Fix.advise(f"use one of {', '.join([*NAMES, *able])}")
        raise MindSpeedError([Problem("MS201", f"there is no schedule {name}", fix=fix)])
    settings = parse_assignments(assignments, "--set")
    if foreign := sorted(settings.keys() - {name}):
        text = f"--set has a setting of {foreign[0]}, but the pipeline schedule to show is that of {name}"
        fix = Fix.advise(f"--schedule {foreign[0]}, or remove the setting")
        raise MindSpeedError([Problem("MS301", text, (name,), where="--set", fix=fix)])
    feature = known.feature(name)
    for option, value in options._asdict().items():
        if value is None:
            continue
        if option not in feature.Args.model_fields:
            text = f"--{option} has no effect, because {name} has no setting {option}"
            raise MindSpeedError([Problem("MS301", text, (name,), where=f"--{option}", fix=Fix.advise(f"remove --{option}"))])
        settings.setdefault(name, {}).setdefault(option, value)
    given = {name: {key: Value(value, "--set") for key, value in settings.get(name, {}).items()}}
    args = Arguments(given).validate(name, feature.Args)
    if isinstance(args, list):
        raise MindSpeedError(args)
    return feature(args, World({}))
