"""An activation plan as one HTML page: features, what each rank holds, patches in order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

from mindspeed.workbench.html_page import page, paragraph, section, table

if TYPE_CHECKING:
    from mindspeed.engine.planning.plan import ActivationPlan
    from mindspeed.engine.resolution.planned_feature import PlannedFeature

_MOST: Final = 512
"""Ranks that are drawn; the others are further replicas, or further stages."""


def plan_page(plan: ActivationPlan) -> str:
    """The page of a plan."""
    known = plan.world.known()
    job = {**plan.environment, **known}
    reasons = [(one.name, "; ".join(map(str, one.why)), _settings(one)) for one in plan.features]
    features = [(number, *texts) for number, texts in enumerate(reasons, 1)]
    own = [planned for planned in plan.patches if planned.owner in plan.names]
    patches = [(one.owner, one.patch.kind, one.patch.target, one.patch.reason, one.skipped or "") for one in own]
    overrides = [(o.override.argument, str(o.override.value), ", ".join(o.owners), o.override.reason) for o in plan.overrides]
    rows = [(row.kind, row.feature, row.line()) for row in plan.rows]
    return page(
        "Activation plan",
        paragraph(f"digest {plan.digest}"),
        section("Features, in activation order", table(("", "feature", "why", "settings"), features)),
        section("Ranks", *_ranks(known)),
        section("Job", table(("field", "value"), [(name, str(value)) for name, value in job.items()])),
        section("Megatron arguments", table(("argument", "value", "from", "reason"), overrides)),
        section("Patches, in order", table(("feature", "kind", "target", "reason", "skipped because"), patches)),
        section("Notes", table(("kind", "feature", "text"), rows)),
    )


def _settings(feature: PlannedFeature) -> str:
    return "\n".join(f"{name} = {value.value} ({value.source})" for name, value in feature.settings.items())


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
