"""An activation plan as one HTML page: what is requested and added, a graph of patches, memory, and what each rank holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

from mindspeed.memory.byte_count import MIB
from mindspeed.memory_planner.plans import stages_of
from mindspeed.problems import MindSpeedError
from mindspeed.registry import catalog
from mindspeed.workbench.html_page import details, heading, inline, page, paragraph, section, table, tiles
from mindspeed.workbench.pictures.drawing import svg
from mindspeed.workbench.pictures.plan_graph import is_requested, plan_graph
from mindspeed.workbench.pictures.stage_memory import memory_bars

if TYPE_CHECKING:
    from mindspeed.engine.planning.plan import ActivationPlan
    from mindspeed.engine.resolution.planned_feature import PlannedFeature
    from mindspeed.memory_planner.stages import Stage

_MOST: Final = 512
"""Ranks that are drawn; the others are further replicas, or further stages."""


def plan_page(plan: ActivationPlan) -> str:
    """The page of a plan."""
    known = plan.world.known()
    job = {**plan.environment, **known}
    stages = _stages(plan)
    own = [planned for planned in plan.patches if planned.owner in plan.names]
    patches = [(one.owner, one.patch.kind, one.patch.target, one.patch.reason, one.skipped or "") for one in own]
    overrides = [(o.override.argument, str(o.override.value), ", ".join(o.owners), o.override.reason) for o in plan.overrides]
    rows = [(row.kind, row.feature, row.line()) for row in plan.rows]
    return page(
        "Activation plan",
        paragraph(
            f"{', '.join(f'{name} {version}' for name, version in plan.environment.items())}; digest {plan.digest}", "note"
        ),
        tiles(_summary(plan, stages)),
        section("Requested", _features(plan, are_requested=True)),
        section("Added", _features(plan, are_requested=False)),
        _graph(plan),
        section("Memory", paragraph(f"No prediction: {stages}.") if isinstance(stages, str) else _memory(stages)),
        section("Ranks", *_ranks(known)),
        section("Notes", table(("kind", "feature", "text"), rows)) if rows else "",
        details("Job", table(("field", "value"), [(name, str(value)) for name, value in job.items()])),
        details("Megatron arguments", table(("argument", "value", "from", "reason"), overrides)),
        details("Patches, in order", table(("feature", "kind", "target", "reason", "skipped because"), patches)),
    )


def _summary(plan: ActivationPlan, stages: list[Stage] | str) -> Iterator[tuple[str, str, str]]:
    """Yield the numbers that one looks for first."""
    requested = sum(map(is_requested, plan.features))
    yield "requested", str(requested), "features"
    yield "added", str(len(plan.features) - requested), "features, each with its reason"
    sites = {planned.site for planned in plan.patches if planned.owner in plan.names and not planned.skipped}
    yield "patched", str(len(sites)), f"functions, in {len({site.partition(':')[0] for site in sites})} modules of Megatron"
    if not isinstance(stages, str):
        fullest = max(stages, key=lambda stage: stage.peak)
        yield "peak memory", f"{fullest.peak / MIB:,.1f} MiB", f"of a rank of stage {fullest.stage}, predicted"


def _features(plan: ActivationPlan, are_requested: bool) -> str:
    """Return the table of the requested features, or of those that the plan adds; numbers are their places in the order."""
    rows = [
        (number, one.name, "; ".join(map(str, one.why)), _settings(one))
        for number, one in enumerate(plan.features, 1)
        if is_requested(one) is are_requested
    ]
    return table(("", "feature", "why", "settings"), rows) if rows else paragraph("None.")


def _graph(plan: ActivationPlan) -> str:
    """Return the graph of features and patches."""
    text = "What is requested, what is added with its reason, and which modules of Megatron that changes."
    picture = plan_graph(plan, "Features and patches of this job", text)
    return section("Features and patches", paragraph(text, "note"), inline(svg(picture), "wide")) if picture is not None else ""


def _stages(plan: ActivationPlan) -> list[Stage] | str:
    """Return the memory of each pipeline stage, or why it cannot be predicted."""
    try:
        return stages_of(plan, catalog())
    except MindSpeedError as error:
        return "; ".join(problem.message for problem in error.problems)


def _memory(stages: list[Stage]) -> str:
    return heading("Predicted for a rank of each stage, at its peak") + memory_bars(stages)


def _settings(feature: PlannedFeature) -> str:
    """Return the settings that differ from their defaults."""
    given = ((name, value) for name, value in feature.settings.items() if value.source != "default")
    return "\n".join(f"{name} = {value.value} ({value.source})" for name, value in given)


def _ranks(known: Mapping[str, object]) -> Iterator[str]:
    """Yield a table for each pipeline stage: a row for each replica and context rank, a column for each tensor rank."""
    size = {name: _whole(known.get(name, 1)) for name in ("tp", "cp", "pp", "ep", "vpp")}
    world = _whole(known.get("world_size", size["tp"] * size["cp"] * size["pp"]))
    stage = world // size["pp"]
    if stage % (size["tp"] * size["cp"]):
        yield paragraph("The sizes do not divide the number of processes.")
        return
    dp = stage // size["tp"] // size["cp"]
    yield paragraph(f"{world} ranks: tp {size['tp']} x cp {size['cp']} x dp {dp} x pp {size['pp']}")
    for number in range(size["pp"]):
        if number * stage >= _MOST:
            yield paragraph(f"The other {size['pp'] - number} stages are laid out alike.")
            return
        yield paragraph(f"Stage {number}: {_layers(known, size, number)}")
        shown = range(0, min(stage, _MOST), size["tp"])
        titles = ["replica", "sequence", *(f"tp {rank}" for rank in range(size["tp"]))]
        yield table(titles, [_row(known, size, number * stage, first) for first in shown], "ranks")


def _row(known: Mapping[str, object], size: Mapping[str, int], start: int, first: int) -> tuple[str, ...]:
    tp, cp = size["tp"], size["cp"]
    replica, part = divmod(first // tp, cp)
    experts, ep = _whole(known.get("num_experts", 0)), size["ep"]

    def held(rank: int) -> str:
        group = expert_group(rank, _whole(known.get("expert_tensor_size", tp)) or tp, ep)
        mine = f"\nexperts {group * experts // ep} to {(group + 1) * experts // ep - 1}" if experts and ep > 1 else ""
        return f"rank {start + rank}{mine}"

    sequence = "whole" if cp == 1 else f"part {part} of {cp}"
    return (f"dp {replica}", sequence, *(held(first + rank) for rank in range(tp)))


def expert_group(rank: int, expert_tp: int, ep: int) -> int:
    """Return the expert-parallel rank of a rank of a stage, in Megatron's order: expert tensor ranks are adjacent."""
    return rank // expert_tp % ep


def _layers(known: Mapping[str, object], size: Mapping[str, int], stage: int) -> str:
    """Name the parts of a stage: each of its chunks has layers, the first the embedding, the last the output layer."""
    layers, pp, vpp = _whole(known.get("num_layers", 0)), size["pp"], size["vpp"]
    if not layers or layers % (pp * vpp):
        return "layers are not spread evenly, or their number is not given"
    each = layers // (pp * vpp)
    firsts = [(chunk * pp + stage) * each for chunk in range(vpp)]
    ends = [*(["embedding"] if stage == 0 else []), *(["output layer and loss"] if stage == pp - 1 else [])]
    return ", ".join([*(f"layers {first} to {first + each - 1}" for first in firsts), *ends])


def _whole(value: object) -> int:
    return value if isinstance(value, int) else 0
