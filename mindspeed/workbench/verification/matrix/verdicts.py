"""Verdicts of the matrix as data. Light."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from mindspeed.workbench.verification.matrix.cases import MatrixCase
from mindspeed.workbench.verification.matrix.reach import Sources


class CaseOutcome(str, Enum):
    """The outcome of a case.

    ``idle``: a feature has nothing to do beside the others, and the plan says so. ``refused-late``: the plan was accepted, and
    the ranks refused it.
    """

    HOLDS = "holds"
    REFUSED = "refused"
    IDLE = "idle"
    REFUSED_LATE = "refused-late"
    FAILS = "fails"

    @property
    def is_defect(self) -> bool:
        """Return whether this breaks the promise that a plan without problems trains."""
        return self in (CaseOutcome.REFUSED_LATE, CaseOutcome.FAILS)


@dataclass(frozen=True, slots=True)
class CaseResult:
    """The verdict of one case and what led to it.

    ``ratio`` is the largest difference as a share of what is allowed, ``what`` the tensor or loss that has it, ``first`` the
    step and the tensor or loss that were the first to leave the baseline. ``involved`` are
    the features of both sides, by whose sources ``key`` was made, ``culprits`` the smallest failing part of a larger set.
    """

    case: MatrixCase
    outcome: CaseOutcome
    reason: str = ""
    code: str = ""
    fix: str = ""
    what: str = ""
    first: str = ""
    ratio: float = 0.0
    ranks: int = 0
    cpu_seconds: float = 0.0
    involved: tuple[str, ...] = ()
    key: str = ""
    chain: tuple[str, ...] = ()
    culprits: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {"name": self.case.name, **asdict(self), "outcome": self.outcome.value, "command": self.case.command}


def result_from_json(data: Mapping[str, Any]) -> CaseResult:
    """Inverse of `CaseResult.to_json`. Raises KeyError, TypeError or ValueError for anything else."""
    values = {name: value for name, value in data.items() if name not in ("name", "command", "case", "outcome")}
    values |= {name: tuple(values.get(name, ())) for name in ("involved", "chain", "culprits")}
    case = MatrixCase(**data["case"] | {"features": tuple(data["case"].get("features", ()))})
    return CaseResult(case, CaseOutcome(data["outcome"]), **values)


def key_of(result: CaseResult, sources: Sources) -> str:
    """Return the key of the sources that a verdict depends on. Raises KeyError for a case whose parts are gone."""
    facts = result.case.facts
    return sources.key(result.involved, *facts, sentences=result.outcome is CaseOutcome.REFUSED)


def count(results: Iterable[CaseResult]) -> dict[str, int]:
    """The number of cases with each outcome."""
    found = [result.outcome for result in results]
    return {outcome.value: found.count(outcome) for outcome in CaseOutcome}
