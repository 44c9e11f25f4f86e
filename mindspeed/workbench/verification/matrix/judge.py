"""Judge a case of the matrix: train both sides, compare, and say what came of it."""

from __future__ import annotations

import time
import traceback
from collections.abc import Sequence
from dataclasses import replace

from mindspeed import registry
from mindspeed.plugins.feature import Numerics
from mindspeed.problems import MindSpeedError, Problem, ResolutionError
from mindspeed.workbench.verification.case import VerificationCase, plan_without
from mindspeed.workbench.verification.comparison import ComparisonResult, Tolerances, compare, first_difference
from mindspeed.workbench.verification.harness import Verdict, compared
from mindspeed.workbench.verification.matrix.cases import MatrixCase
from mindspeed.workbench.verification.matrix.reach import Sources
from mindspeed.workbench.verification.matrix.verdicts import CaseOutcome, CaseResult, key_of
from mindspeed.workbench.verification.pool import WorkerPool
from mindspeed.workbench.verification.record import RankResult
from mindspeed.workbench.verification.surroundings import required_by

HARNESS = ("MS604", "MS607")
"""Codes of a run that ended or a claim that does not hold; every other code is a feature that refuses."""


def judge(case: MatrixCase, pool: WorkerPool, sources: Sources) -> CaseResult:
    """Run a case; any error in it is its verdict. The pool continues with other workers after a lost one."""
    before = pool.cpu_seconds, time.thread_time()
    result = _judged(case, pool)
    taken = pool.cpu_seconds - before[0] + time.thread_time() - before[1]
    involved = result.involved or tuple(sorted(required_by(case.tested, registry.catalog(), perhaps=True)))
    result = replace(result, cpu_seconds=round(taken, 2), involved=involved)
    return replace(result, key=key_of(result, sources))


def _judged(case: MatrixCase, pool: WorkerPool) -> CaseResult:
    built: VerificationCase | None = None
    try:
        built = case.build()
        baseline = pool.run_once(built.baseline, built.recipe, int(built.baseline.world.world_size))
        records = pool.run(built.plan, built.recipe, int(built.plan.world.world_size), baseline)
        result = _of_verdict(case, built, compared(built, baseline, records))
        for name in _exact_beside_others(case, built) if result.outcome is CaseOutcome.HOLDS else ():
            if changed := _changed_bits(built, name, pool, baseline, records):
                others = ", ".join(other for other in case.features if other != name)
                text = f"{name} changes bits together with {others}: {changed[0].what} differs"
                failed = replace(result, outcome=CaseOutcome.FAILS, code="MS607", reason=text)
                result = replace(failed, what=changed[0].what, first=first_difference(changed), ratio=1e9)
        return result
    except ResolutionError as error:
        return _of_problem(case, error.problems[0], CaseOutcome.REFUSED)
    except MindSpeedError as error:
        problem = error.problems[0]
        late = built is not None and problem.code not in HARNESS
        return _about(built, _of_problem(case, problem, CaseOutcome.REFUSED_LATE if late else CaseOutcome.FAILS))
    except Exception as error:  # a mistake of a feature's declaration, or of ours: it costs this case, not the others
        lines = tuple(traceback.format_exc().splitlines()[-4:])
        text = f"{type(error).__name__}: {error}"
        return _about(built, CaseResult(case, CaseOutcome.FAILS, text, chain=lines))


def _exact_beside_others(case: MatrixCase, built: VerificationCase) -> list[str]:
    """The features of a pair that claim equal bits while the pair claims less: their part is judged without a tolerance."""
    if len(case.features) != 2 or built.numerics.claim == "exact":
        return []
    specs = [registry.catalog().feature(name).spec for name in case.features if name in built.plan.names]
    return [spec.name for spec in specs if spec.numerics.claim == "exact" and not spec.sizes and spec.reference is None]


def _changed_bits(
    built: VerificationCase, name: str, pool: WorkerPool, baseline: Sequence[RankResult], records: Sequence[RankResult]
) -> list[ComparisonResult]:
    """The tensors and losses that differ from a run of all features but one; routers choose in both as in the baseline."""
    try:
        others = plan_without(built, name)
    except ResolutionError:  # another feature requires it: there is nothing to compare with
        return []
    routed = any(record.choices for record in baseline)
    without = (
        pool.run(others, built.recipe, len(records), baseline) if routed else pool.run_once(others, built.recipe, len(records))
    )
    compared_bits = compare(without, records, Tolerances.of(Numerics.exact(), built.recipe.dtype))
    return [check for check in compared_bits if not check.holds]


def _of_verdict(case: MatrixCase, built: VerificationCase, verdict: Verdict) -> CaseResult:
    worst = max(verdict.checks, key=_ratio)
    result = CaseResult(case, CaseOutcome.HOLDS, what=worst.what, ratio=min(_ratio(worst), 1e9))
    if not verdict.holds:
        problems = verdict.problems
        failed, first = _of_problem(case, problems[0], CaseOutcome.FAILS), first_difference(verdict.checks)
        result = replace(failed, what=worst.what, first=first, ratio=min(_ratio(worst), 1e9))
    elif stepped_aside := [name for name in case.features if name not in built.plan.names]:
        rows = [row.text for row in built.plan.rows if row.feature in stepped_aside]
        reason = "; ".join(rows) or f"{', '.join(stepped_aside)} is not active"
        result = replace(result, outcome=CaseOutcome.IDLE, reason=reason)
    elif idle := [check.what for check in verdict.checks if check.idle]:
        result = replace(result, outcome=CaseOutcome.IDLE, reason="; ".join(idle))
    return _about(built, result)


def _ratio(check: ComparisonResult) -> float:
    """The difference as a share of what is allowed; infinite where bits must be equal and are not, or could not be compared."""
    if check.largest_difference is None:
        return float("inf")
    if check.largest_difference == 0.0:
        return 0.0
    return check.largest_difference / check.tolerance if check.tolerance else float("inf")


def _of_problem(case: MatrixCase, problem: Problem, outcome: CaseOutcome) -> CaseResult:
    return CaseResult(case, outcome, problem.message, problem.code, problem.fix_text, chain=tuple(problem.chain))


def _about(built: VerificationCase | None, result: CaseResult) -> CaseResult:
    if built is None:
        return result
    plans = (built.plan, built.baseline)
    involved = sorted({feature.name for plan in plans for feature in (*plan.base, *plan.features)} | set(built.features))
    return replace(result, ranks=int(built.plan.world.world_size), involved=tuple(involved))
