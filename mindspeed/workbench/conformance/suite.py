"""All checks of one feature or distribution, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from mindspeed.engine.resolution.request import Layer
from mindspeed.plugins.discovery import BUILT_IN
from mindspeed.problems.problem import MindSpeedError, ResolutionError
from mindspeed.registry import catalog
from mindspeed.workbench.conformance import declaration
from mindspeed.workbench.conformance.application import CHECKS as APPLIED
from mindspeed.workbench.conformance.application import application, import_cost
from mindspeed.workbench.conformance.outcome import Outcome, judged
from mindspeed.workbench.conformance.subjects import Subject, rows_of, subjects
from mindspeed.workbench.diagnostics import doctor
from mindspeed.workbench.verification.case import VerificationCase, build_case
from mindspeed.workbench.verification.harness import verify
from mindspeed.workbench.verification.matrix.cases import MatrixCase
from mindspeed.workbench.verification.pool import WorkerPool

DECLARED: Final[dict[str, Callable[[Subject], Outcome]]] = {
    "schema": declaration.schema,
    "metadata": declaration.metadata,
    "references": declaration.references,
    "targets": declaration.targets,
    "order": declaration.order,
}
"""Checks that need nothing but the declaration."""

PARITY: Final = ("parity", "level 1")
"""Checks that train a tiny model, alone and beside all that optimization level 1 adds to a model with experts."""
CHECKS: Final = (*DECLARED, "import cost", *APPLIED, *PARITY)


class Suite:
    """The checks of a feature, or of all features of a distribution; each runs when its outcome is first read.

    ``prove`` also trains a tiny model with and without each feature, which takes a minute. Raises ResolutionError when
    nothing is called ``name``.
    """

    def __init__(self, name: str, prove: bool = False) -> None:
        self.prove = prove
        self.tested = subjects(name)
        self.loaded = [subject for subject in self.tested if subject.name in subject.known.usable]
        self._outcomes: dict[tuple[str, str], Outcome] = {}

    def outcome(self, subject: Subject, check: str) -> Outcome | None:
        """The outcome of one check; None for a feature that cannot be loaded, of which only the metadata are judged."""
        if subject not in self.loaded:
            return _broken(subject) if check == "metadata" else None
        if check in DECLARED:
            return DECLARED[check](subject)
        examination = {"import cost": import_cost, **dict.fromkeys(PARITY, self._parity)}.get(check, application)
        if (subject.name, check) not in self._outcomes:
            self._outcomes |= {(outcome.feature, outcome.check): outcome for outcome in examination(self.loaded)}
        return self._outcomes[subject.name, check]

    def _parity(self, tested: Sequence[Subject]) -> list[Outcome]:
        missing = ", ".join(problem.message for problem in doctor.problems()) if self.prove else ""
        if missing or not self.prove:
            reason = missing or "trains a small model; --parity runs it (pytest: --mindspeed-parity)"
            return [Outcome(subject.name, check, "not run", reason) for subject in tested for check in PARITY]
        with WorkerPool() as pool:
            return [_parity(subject, check, pool) for subject in tested for check in PARITY]


def examine(name: str, prove: bool = False) -> Iterator[Outcome]:
    """Yield every outcome of a `Suite` when it is known, feature by feature in the order of `CHECKS`."""
    suite = Suite(name, prove)
    outcomes = (suite.outcome(subject, check) for subject in suite.tested for check in CHECKS)
    yield from (outcome for outcome in outcomes if outcome is not None)


def _parity(subject: Subject, check: str, pool: WorkerPool) -> Outcome:
    """Train a tiny model with and without a feature and compare, as ``mindspeed features verify`` does."""
    try:
        verdict = verify(build_case([subject.name]) if check == PARITY[0] else _beside_level_one(subject.name), pool)
    except MindSpeedError as error:
        lines = str(error).splitlines()
        return Outcome(subject.name, check, "failed", lines[0], tuple(lines[1:]))
    fine = f"with against without: {verdict.claim} holds in {len(verdict.checks)} comparisons"
    return judged(subject.name, check, [problem.message for problem in verdict.problems], fine)


def _beside_level_one(name: str) -> VerificationCase:
    """The case on a model with experts, to which most of level 1 applies; on a dense one for a feature that refuses experts."""
    try:
        return build_case([name], [Layer("conformance", world={"num_experts": 4})], level_one=True)
    except ResolutionError:
        return build_case([name], level_one=True)


def _broken(subject: Subject) -> Outcome:
    lines = [line for problem in subject.problems for line in str(problem).splitlines()]
    return Outcome(subject.name, "metadata", "failed", lines[0], tuple(lines[1:]))


def pairs_of(name: str) -> list[MatrixCase]:
    """Return the pairs of a distribution or feature. Raises ResolutionError (MS201) when nothing is called ``name``."""
    known = catalog()
    tested = {row.name for row in rows_of(name)} & known.usable.keys()
    others = tested | {row.name for row in known.usable.values() if row.distribution == BUILT_IN}
    pairs = {tuple(sorted((one, other))) for one in tested for other in others if one != other}
    return [MatrixCase(pair) for pair in sorted(pairs)]
