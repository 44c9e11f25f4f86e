"""Reduce a failing set of features to a smallest part that fails in the same way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from mindspeed.workbench.verification.matrix.cases import MatrixCase
from mindspeed.workbench.verification.matrix.minimal import minimal
from mindspeed.workbench.verification.matrix.verdicts import CaseResult


def same_failure(whole: CaseResult, part: CaseResult) -> bool:
    """Return whether a subset fails as the whole does: a rank that is lost is another fault than a wrong gradient."""
    return part.outcome is whole.outcome and part.code == whole.code


def with_culprits(whole: CaseResult, judged: Callable[[MatrixCase], CaseResult]) -> CaseResult:
    """Return the verdict of a failing set with the features of its smallest failing part."""

    def fails(features: tuple[str, ...]) -> bool:
        return same_failure(whole, judged(_part(whole.case, features)))

    return replace(whole, culprits=tuple(sorted(minimal(whole.case.features, fails))))


def _part(case: MatrixCase, features: tuple[str, ...]) -> MatrixCase:
    """The case of a subset, in the dtype of the whole: the one that the subset has by its name may hide the fault."""
    part = replace(case, features=tuple(sorted(features)))
    return part if part.dtype == case.dtype else replace(part, given={**case.given, "dtype": case.dtype})
