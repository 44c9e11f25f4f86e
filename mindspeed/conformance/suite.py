"""All checks of one feature or distribution, in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from mindspeed.conformance import declaration
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

CHECKS: Final = (*DECLARED, "import cost", "reversible", "idempotent", "parity")


def examine(name: str, prove: bool = False) -> list[Outcome]:
    """Every check of a feature, or of all features of a distribution, feature by feature in the order of `CHECKS`.

    ``prove`` also trains a tiny model with and without each feature, which takes a minute. Raises ResolutionError when
    nothing is called ``name``.
    """
    tested = subjects(name)
    loaded = [subject for subject in tested if subject.row.feature is not None and subject.name in subject.known.usable]
    outcomes = [_broken(subject) for subject in tested if subject not in loaded]
    outcomes += [check(subject) for subject in loaded for check in DECLARED.values()]
    if loaded:
        outcomes += [*import_cost(loaded), *application(loaded), *_proofs(loaded, prove)]
    return sorted(outcomes, key=lambda outcome: (outcome.feature, CHECKS.index(outcome.check)))


def _proofs(loaded: Sequence[Subject], prove: bool) -> list[Outcome]:
    if prove:
        return parity(loaded)
    return [Outcome(subject.name, "parity", "not run", "trains a tiny model; ask for it with --parity") for subject in loaded]


def _broken(subject: Subject) -> Outcome:
    lines = [line for problem in subject.problems for line in str(problem).splitlines()]
    return Outcome(subject.name, "metadata", "failed", lines[0], tuple(lines[1:]))
