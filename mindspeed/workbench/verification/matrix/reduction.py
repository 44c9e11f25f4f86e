"""Reduce a failing set of features to a smallest part that fails in the same way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from mindspeed.workbench.verification.matrix.cases import MatrixCase
from mindspeed.workbench.verification.matrix.verdicts import CaseResult

Item = TypeVar("Item")


def minimal(items: Sequence[Item], fails: Callable[[tuple[Item, ...]], bool]) -> tuple[Item, ...]:
    """Return a subset of ``items`` that fails and from which nothing can be removed; ``items`` as a whole must fail.

    One culprit of n takes about log2(n) + 2 questions, k of them k times as many: the shortest failing beginning ends with a
    culprit, which then stands first when the beginning before it is searched (QuickXplain, Junker 2004). Where failing is not
    monotone, items that need one another are found by leaving each out of what remains.
    """
    found: tuple[Item, ...] = ()
    rest = tuple(items)
    while not found or not fails(found):
        if not rest:
            return _without_needless(tuple(items), fails)
        length = _shortest_failing(found, rest, fails)
        found, rest = (rest[length - 1], *found), rest[: length - 1]
    return _without_needless(found, fails)


def _shortest_failing(found: tuple[Item, ...], rest: tuple[Item, ...], fails: Callable[[tuple[Item, ...]], bool]) -> int:
    """The length of the shortest beginning of ``rest`` that fails together with ``found``; all of it is taken to fail."""
    low, high = 1, len(rest)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fails((*found, *rest[:middle])) else (middle + 1, high)
    return low


def _without_needless(items: tuple[Item, ...], fails: Callable[[tuple[Item, ...]], bool]) -> tuple[Item, ...]:
    """Leave out every item without which the rest still fails."""
    kept = items
    for item in items if len(items) > 1 else ():
        fewer = tuple(other for other in kept if other is not item)
        if fewer and fails(fewer):
            kept = fewer
    return kept


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
