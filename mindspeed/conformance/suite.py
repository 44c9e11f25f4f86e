"""All checks of one feature or distribution, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from mindspeed.conformance import declaration
from mindspeed.conformance.application import CHECKS as APPLIED
from mindspeed.conformance.application import application, import_cost
from mindspeed.conformance.outcome import Outcome, judged
from mindspeed.conformance.subjects import Subject, subjects
from mindspeed.diagnostics import doctor
from mindspeed.plugins.problems import MindSpeedError
from mindspeed.verification.case import build_case
from mindspeed.verification.harness import verify
from mindspeed.verification.pool import WorkerPool

DECLARED: Final[dict[str, Callable[[Subject], Outcome]]] = {
    "schema": declaration.schema,
    "metadata": declaration.metadata,
    "references": declaration.references,
    "targets": declaration.targets,
    "order": declaration.order,
}
"""Checks that need nothing but the declaration."""

CHECKS: Final = (*DECLARED, "import cost", *APPLIED, "parity")


class Suite:
    """The checks of a feature, or of all features of a distribution; each is run when its outcome is first asked for.

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
        examination = {"import cost": import_cost, "parity": self._parity}.get(check, application)
        if (subject.name, check) not in self._outcomes:
            self._outcomes |= {(outcome.feature, outcome.check): outcome for outcome in examination(self.loaded)}
        return self._outcomes[subject.name, check]

    def _parity(self, tested: Sequence[Subject]) -> list[Outcome]:
        missing = ", ".join(problem.message for problem in doctor.problems()) if self.prove else ""
        if missing or not self.prove:
            reason = missing or "trains a tiny model; ask for it with --parity"
            return [Outcome(subject.name, "parity", "not run", reason) for subject in tested]
        with WorkerPool() as pool:
            return [_parity(subject, pool) for subject in tested]


def examine(name: str, prove: bool = False) -> Iterator[Outcome]:
    """Yield every outcome of a `Suite` when it is known, feature by feature in the order of `CHECKS`."""
    suite = Suite(name, prove)
    outcomes = (suite.outcome(subject, check) for subject in suite.tested for check in CHECKS)
    yield from (outcome for outcome in outcomes if outcome is not None)


def _parity(subject: Subject, pool: WorkerPool) -> Outcome:
    """Train a tiny model with and without a feature and compare, as ``mindspeed features verify`` does."""
    try:
        verdict = verify(build_case([subject.name]), pool)
    except MindSpeedError as error:
        lines = str(error).splitlines()
        return Outcome(subject.name, "parity", "failed", lines[0], tuple(lines[1:]))
    wrong = [problem.message for problem in verdict.problems]
    return judged(subject.name, "parity", wrong, f"on against off: {verdict.claim} holds in {len(verdict.checks)} comparisons")


def _broken(subject: Subject) -> Outcome:
    lines = [line for problem in subject.problems for line in str(problem).splitlines()]
    return Outcome(subject.name, "metadata", "failed", lines[0], tuple(lines[1:]))
