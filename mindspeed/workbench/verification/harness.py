"""The proof: run baseline and feature, compare, and say whether the claim holds."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from operator import attrgetter, methodcaller
from typing import Any, Final

from mindspeed import plugins as ms
from mindspeed import registry
from mindspeed.engine.planning.plan import ActivationPlan
from mindspeed.memory_planner.plans import stages_of
from mindspeed.plugins.answers import implements
from mindspeed.plugins.conditions import obstacle
from mindspeed.workbench.verification.case import VerificationCase
from mindspeed.workbench.verification.comparison import ComparisonResult, Tolerances, compare, zero_or_not_finite
from mindspeed.workbench.verification.pool import WorkerPool
from mindspeed.workbench.verification.record import RankResult
from mindspeed.workbench.verification.surroundings import required_by

_BYTES_OF: Final = "bytes of "
_BYTES: Final = 0.01
_KEPT: Final = {
    "saved activations": ("activations.device", "activations"),
    "saved activations in host memory": ("activations.host", "swapped"),
    "optimizer between steps": ("optimizer.device", "optimizer.device"),
    "optimizer in host memory between steps": ("optimizer.host", "optimizer.host"),
}
"""Bytes that a run keeps: where the record of a rank has them, and where the stage that the planner foretells."""


@dataclass(frozen=True, slots=True)
class VerificationDetails:
    """Details of a verdict: the world of the feature's run, the sites it reached, and the bytes it moved and kept.

    ``sites_reached`` maps ``feature`` to ``{site or hook: calls}``; ``bytes`` has the bytes sent per kind of collective
    and the bytes that activations and the optimizer keep, each as ``[baseline, feature]`` on the rank that has most.
    ``formula`` is what the declarations of the features foretell of these, where they change them. ``note`` says which of the
    surroundings that the features declare are missing. Where the rules of a backend are checked, ``host_reads`` counts the
    reads of device values in a step by operation and line, and ``communicators`` are those of a rank, each on the rank with
    most.
    """

    world: dict[str, Any]
    sites_reached: dict[str, dict[str, int]]
    bytes: dict[str, tuple[int, int]]
    formula: dict[str, tuple[int, int]] = field(default_factory=dict)
    note: str = ""
    host_reads: dict[str, int] = field(default_factory=dict)
    communicators: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict of a case, with every comparison that led to it."""

    feature: str
    claim: str
    checks: tuple[ComparisonResult, ...]
    proof: VerificationDetails

    @property
    def holds(self) -> bool:
        return all(check.holds for check in self.checks)

    @property
    def problems(self) -> list[ms.Problem]:
        """Return an MS607 for each check that does not hold."""
        return [_problem(self.feature, check) for check in self.checks if not check.holds]

    def to_json(self) -> dict[str, Any]:
        return {"feature": self.feature, "claim": self.claim, "holds": self.holds, **asdict(self)}


def verify(case: VerificationCase, pool: WorkerPool, progress: Callable[[str], None] = lambda step: None) -> Verdict:
    """Run both sides and compare, telling ``progress`` each step. Raises RunError when a run fails or a worker is lost."""
    steps = f"{case.recipe.steps} steps of {case.recipe.shape.name}"
    progress(f"baseline: {steps} on {_processes(case.baseline)}")
    baseline = pool.run_once(case.baseline, case.recipe, int(case.baseline.world.world_size))
    progress(f"{', '.join(case.features)}: {steps} on {_processes(case.plan)}")
    feature = pool.run(case.plan, case.recipe, int(case.plan.world.world_size), baseline)
    progress("comparing losses, gradients and weights")
    return compared(case, baseline, feature)


def compared(case: VerificationCase, baseline: Sequence[RankResult], feature: Sequence[RankResult]) -> Verdict:
    """Compare the records of both sides of a case."""
    details = _details(case, baseline, feature)
    checks = [
        *missing_effects(case, baseline, feature),
        *zero_or_not_finite(feature),
        *compare(baseline, feature, Tolerances.of(case.numerics, case.recipe.dtype)),
        *(byte_checks(details.formula, details.bytes) if _saves_bytes(case) else ()),
    ]
    return Verdict(", ".join(case.features), case.numerics.claim, tuple(checks), details)


def missing_effects(
    case: VerificationCase, baseline: Sequence[RankResult], feature: Sequence[RankResult]
) -> Iterator[ComparisonResult]:
    """A failing check for every feature under test that left no trace.

    A feature that has nothing to do gets a row, unless that holds for every feature under test.
    """
    known = registry.catalog()
    before, after = baseline[0].settings, feature[0].settings
    idle = {name: reason for name in case.features if (reason := _why_idle(name, case, feature[0]))}
    for name in case.features:
        if name in idle:
            all_idle = len(idle) == len(case.features)
            yield _failed(name, idle[name]) if all_idle else _idle(name, idle[name])
            continue
        spec = known.feature(name).spec
        called = {place for record in feature for place, count in record.reached.get(name, {}).items() if count}
        if uncalled := [op for op in spec.ops if op not in called]:
            yield _failed(name, f"the operator {', '.join(uncalled)} was not called")
            continue
        if (algorithm := ", ".join(spec.verify_with.algorithm)) and algorithm not in called:
            yield _failed(name, f"no function of {algorithm} was called")
            continue
        arguments = {planned.override.argument for planned in case.plan.overrides if name in planned.owners}
        if arguments and _values(arguments, before) != _values(arguments, after):
            continue
        if any(not (arguments and place.startswith("around_")) for place in called):  # such a hook may have done nothing
            continue
        phases = {planned.patch.phase for planned in case.plan.patches if planned.owner == name and not planned.skipped}
        if phases == {"checkpoint"}:
            reason = "it acts when a checkpoint is written, but verification writes none"
            yield _idle(name, reason)
        elif arguments:
            yield _failed(name, "the configuration of the model equals the baseline's")
        elif not spec.sizes:
            yield _failed(name, "no patch target was called, and no hook changed anything")


def byte_checks(formula: Mapping[str, tuple[int, int]], counted: Mapping[str, tuple[int, int]]) -> Iterator[ComparisonResult]:
    """Compare each change of bytes that features declare with the change that was counted.

    A formula that does not give the counted bytes of the baseline is shown and not held to: experts whose tokens are dealt out
    unevenly, attention over parts of a sequence.
    """
    without = {kind: counted.get(kind, (0, 0))[0] for kind in formula}
    if all(abs(without[kind] - before) <= _BYTES * max(without[kind], 1) for kind, (before, _) in formula.items()):
        for kind, (before, after) in formula.items():
            if change := before - after:
                found = without[kind] - counted.get(kind, (0, 0))[1]
                yield ComparisonResult(f"{_BYTES_OF}{kind}", abs(found - change) / abs(change), _BYTES)


def _saves_bytes(case: VerificationCase) -> bool:
    """Return whether fewer bytes are what all features under test are for; poison keeps the place of what is away."""
    poisoned = any(planned.args.get("poison") for planned in case.plan.base)
    return not poisoned and all(registry.catalog().feature(name).spec.category is ms.Category.MEMORY for name in case.features)


def _why_idle(name: str, case: VerificationCase, record: RankResult) -> str:
    """Say why a feature has nothing to do: one rank, the settings of the baseline, or a condition that declares it; else ''."""
    if sizes := _sizes_of_one(name, record):
        return f"the group of {', '.join(sizes)} has one rank"
    feature = registry.catalog().feature(name)
    planned = next(planned for planned in case.plan.features if planned.name == name)
    if any((planned.name, planned.args) == (other.name, other.args) for other in case.baseline.features):
        return "its settings are those of the baseline"
    found = obstacle(feature.spec.constraints, name, feature.Args(**planned.args), case.plan.world)
    return found.message if found is not None and found.condition.otherwise == "idle" else ""


def _sizes_of_one(name: str, record: RankResult) -> list[str]:
    """The parallel sizes that a feature needs and whose group has one rank."""
    known = registry.catalog()
    needed = {size for owner in required_by([name], known) for size in known.feature(owner).spec.sizes}
    return [size for size in sorted(needed) if record.sizes.get(size, 1) == 1]


def _values(arguments: Iterable[str], settings: Mapping[str, str]) -> dict[str, str]:
    return {place: value for place, value in settings.items() if place.partition(".")[2] in arguments}


def _failed(name: str, why: str) -> ComparisonResult:
    return ComparisonResult(f"effect of {name}: {why}", None, 0.0)


def _idle(name: str, why: str) -> ComparisonResult:
    return ComparisonResult(f"idle of {name}: {why}", 0.0, 0.0, idle=True)


def _processes(plan: ActivationPlan) -> str:
    count = int(plan.world.world_size)
    return "1 process" if count == 1 else f"{count} processes"


def _details(case: VerificationCase, baseline: Sequence[RankResult], feature: Sequence[RankResult]) -> VerificationDetails:
    reached: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for record in feature:
        for name, places in record.reached.items():
            reached[name].update(places)
    traffic = [[record.traffic for record in run] for run in (baseline, feature)]
    kinds = sorted({kind for run in traffic for counted in run for kind in counted})
    moved = {kind: _largest(methodcaller("get", kind, 0), *traffic) for kind in kinds}
    kept = {kind: _largest(attrgetter(counted), baseline, feature) for kind, (counted, _) in _KEPT.items()}
    moved |= {kind: sizes for kind, sizes in kept.items() if any(sizes)}
    world = {"world_size": case.plan.world.world_size, **feature[0].sizes}
    reached_by = {name: dict(places) for name, places in sorted(reached.items())}
    reads = max((record.host_reads for record in feature), key=lambda counted: sum(counted.values()))
    communicators = max((record.communicators for record in feature), key=len)
    return VerificationDetails(world, reached_by, moved, _foretold(case), case.note, reads, tuple(communicators))


def _largest(of: Callable[[Any], int], baseline: Iterable[Any], feature: Iterable[Any]) -> tuple[int, int]:
    """The most bytes that a rank or a stage of each run has."""
    return max(int(of(part)) for part in baseline), max(int(of(part)) for part in feature)


def _foretold(case: VerificationCase) -> dict[str, tuple[int, int]]:
    """The bytes of both runs by the declarations of the features under test, as far as these change and it is foretold."""
    features = [registry.catalog().feature(name) for name in case.features]
    saves, rests = (any(implements(feature, hook) for feature in features) for hook in ("saved_tensors", "resting"))
    if not (saves or rests):
        return {}
    try:
        runs = [stages_of(plan, registry.catalog(), case.recipe.shape.dropout > 0) for plan in (case.baseline, case.plan)]
    except ms.MindSpeedError:  # a model whose memory is not foretold is trained all the same
        return {}
    changed = {kind: stage for kind, (_, stage) in _KEPT.items() if (saves if kind.startswith("saved") else rests)}
    found = {kind: _largest(attrgetter(stage), *runs) for kind, stage in changed.items()}
    return {kind: sizes for kind, sizes in found.items() if any(sizes)}


def _problem(feature: str, check: ComparisonResult) -> ms.Problem:
    if check.largest_difference is None:
        text = check.what if "effect of" in check.what or " is " in check.what else f"{check.what} could not be compared"
    elif check.what.startswith(_BYTES_OF):
        wrong = f"{check.largest_difference:.1%} from the value of the formula, but {check.tolerance:.0%} is allowed"
        text = f"the change of the {check.what} differs by {wrong}"
    else:
        text = (
            f"{check.what} differs by {check.largest_difference:.3g} from the baseline, the run with which the tested "
            f"feature is compared, but only {check.tolerance:.3g} is allowed"
        )
    fix = ms.Fix.advise("remove the tested feature from the job, and report the difference to its authors")
    return ms.Problem("MS607", text, tuple(feature.split(", ")), fix=fix)
