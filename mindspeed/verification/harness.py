"""The proof: run baseline and feature, compare, and say whether the claim holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mindspeed.planning.plan import ActivationPlan
from mindspeed.plugins.problems import Problem
from mindspeed.verification.case import VerificationCase
from mindspeed.verification.comparison import Check, Tolerances, compare, zero_or_not_finite
from mindspeed.verification.effects import missing_effects
from mindspeed.verification.pool import WorkerPool
from mindspeed.verification.record import RankResult


@dataclass(frozen=True, slots=True)
class VerificationDetails:
    """Details of a verdict: the world of the feature's run, the sites it reached, and the bytes it moved and kept.

    ``sites_reached`` maps ``feature`` to ``{site or hook: calls}``; ``bytes`` has the bytes sent per kind of collective
    and, where they could be counted, the activation bytes saved for backward, each as ``[baseline, feature]`` on the rank
    that has most.
    """

    world: dict[str, Any]
    sites_reached: dict[str, dict[str, int]]
    bytes: dict[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict of a case, with every comparison that led to it."""

    feature: str
    claim: str
    checks: tuple[Check, ...]
    proof: VerificationDetails

    @property
    def holds(self) -> bool:
        return all(check.holds for check in self.checks)

    @property
    def problems(self) -> list[Problem]:
        """Return an MS607 for each check that does not hold."""
        return [_problem(self.feature, check) for check in self.checks if not check.holds]

    def to_json(self) -> dict[str, Any]:
        checks = [asdict(check) for check in self.checks]
        return {
            "feature": self.feature,
            "claim": self.claim,
            "holds": self.holds,
            "checks": checks,
            "proof": asdict(self.proof),
        }


def verify(case: VerificationCase, pool: WorkerPool, progress: Callable[[str], None] = lambda step: None) -> Verdict:
    """Run both sides and compare, telling ``progress`` each step. Raises RunError when a run fails or a worker is lost."""
    steps = f"{case.recipe.steps} steps of {case.recipe.shape.name}"
    progress(f"baseline: {steps} on {_processes(case.baseline)}")
    baseline = pool.run_once(case.baseline, case.recipe, int(case.baseline.world.world_size))
    progress(f"{', '.join(case.features)}: {steps} on {_processes(case.plan)}")
    feature = pool.run(case.plan, case.recipe, int(case.plan.world.world_size))
    progress("comparing losses, gradients and weights")
    checks = [
        *missing_effects(case, baseline, feature),
        *zero_or_not_finite(feature),
        *compare(baseline, feature, Tolerances.of(case.numerics, case.recipe.dtype)),
    ]
    return Verdict(", ".join(case.features), case.numerics.claim, tuple(checks), _proof(case, baseline, feature))


def _processes(plan: ActivationPlan) -> str:
    count = int(plan.world.world_size)
    return "1 process" if count == 1 else f"{count} processes"


def _proof(case: VerificationCase, baseline: Sequence[RankResult], feature: Sequence[RankResult]) -> VerificationDetails:
    reached: dict[str, Counter[str]] = {}
    for record in feature:
        for name, places in record.reached.items():
            reached.setdefault(name, Counter()).update(places)
    kinds = sorted({kind for record in (*baseline, *feature) for kind in record.traffic})
    moved = {kind: (_most(baseline, kind), _most(feature, kind)) for kind in kinds}
    kept = (max(r.activations for r in baseline), max(r.activations for r in feature))
    world = {"world_size": case.plan.world.world_size, **feature[0].sizes}
    saved = {"saved activations": kept} if all(kept) else {}
    return VerificationDetails(world, {name: dict(places) for name, places in sorted(reached.items())}, {**moved, **saved})


def _most(records: Sequence[RankResult], kind: str) -> int:
    return max(record.traffic.get(kind, 0) for record in records)


def _problem(feature: str, check: Check) -> Problem:
    if check.largest_difference is None:
        text = check.what if "effect of" in check.what or " is " in check.what else f"{check.what} could not be compared"
    else:
        text = f"{check.what} differs by {check.largest_difference:.3g}, and {check.tolerance:.3g} is allowed"
    return Problem("MS607", text, tuple(feature.split(", ")))
