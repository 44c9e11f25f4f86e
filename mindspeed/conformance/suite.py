"""All checks of one feature or distribution, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Final

from mindspeed.conformance import declaration
from mindspeed.conformance.application import CHECKS as APPLIED
from mindspeed.conformance.application import application
from mindspeed.conformance.lightness import import_cost
from mindspeed.conformance.numerics import parity
from mindspeed.conformance.outcome import Outcome
from mindspeed.conformance.subjects import Subject, subjects

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

    def outcome(self, subject: Subject, check: str) -> Outcome | None:
        """The outcome of one check; None for a feature that cannot be loaded, of which only the metadata are judged."""
        if subject not in self.loaded:
            return _broken(subject) if check == "metadata" else None
        if check in DECLARED:
            return DECLARED[check](subject)
        groups = {"import cost": "_imports", "parity": "_proofs"}
        outcomes: Sequence[Outcome] = getattr(self, groups.get(check, "_applications"))
        return next(outcome for outcome in outcomes if (outcome.feature, outcome.check) == (subject.name, check))

    @cached_property
    def _imports(self) -> list[Outcome]:
        return import_cost(self.loaded)

    @cached_property
    def _applications(self) -> list[Outcome]:
        return application(self.loaded)

    @cached_property
    def _proofs(self) -> list[Outcome]:
        if self.prove:
            return parity(self.loaded)
        return [Outcome(s.name, "parity", "not run", "trains a tiny model; ask for it with --parity") for s in self.loaded]


def examine(name: str, prove: bool = False) -> Iterator[Outcome]:
    """Yield every outcome of a `Suite` when it is known, feature by feature in the order of `CHECKS`."""
    suite = Suite(name, prove)
    outcomes = (suite.outcome(subject, check) for subject in suite.tested for check in CHECKS)
    yield from (outcome for outcome in outcomes if outcome is not None)


def _broken(subject: Subject) -> Outcome:
    lines = [line for problem in subject.problems for line in str(problem).splitlines()]
    return Outcome(subject.name, "metadata", "failed", lines[0], tuple(lines[1:]))
