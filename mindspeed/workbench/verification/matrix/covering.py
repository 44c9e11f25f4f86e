"""Covering arrays: few large sets of features in which every two, or every three, meet. Light."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations

from mindspeed.workbench.verification.matrix.cases import MatrixCase
from mindspeed.workbench.verification.matrix.verdicts import CaseOutcome, CaseResult

Resolves = Callable[[Sequence[str]], bool]


def covering_sets(
    names: Iterable[str],
    strength: int,
    size: int,
    resolves: Resolves,
    seed: int = 0,
) -> list[tuple[str, ...]]:
    """Sets of at most ``size`` features that resolve and in which every ``strength`` features that can meet do meet.

    Greedy: each set begins with features that have not met, and takes the one that meets most others anew as long as the set
    resolves. Features of which some two do not resolve together never meet.
    """
    names = sorted(names)
    fits = {frozenset(pair) for pair in combinations(names, 2) if resolves(pair)}
    todo = {
        frozenset(some) for some in combinations(names, strength) if all(frozenset(p) in fits for p in combinations(some, 2))
    }
    chance, found = random.Random(seed), list[tuple[str, ...]]()
    for first in sorted(todo, key=sorted):
        if first not in todo:
            continue
        made = sorted(first)
        if len(made) > 2 and not resolves(made):
            todo.discard(first)
            continue
        candidates = [name for name in names if name not in first]
        chance.shuffle(candidates)
        while candidates and len(made) < size:
            gains = {name: _new(todo, made, name, strength) for name in candidates if _fits(fits, made, name)}
            best = max(gains, key=gains.__getitem__, default="")
            if not best or not gains[best]:
                break
            candidates.remove(best)
            if resolves([*made, best]):
                made.append(best)
        found.append(tuple(sorted(made)))
        todo -= {frozenset(some) for some in combinations(made, strength)}
    return found


def by_verdicts(known: Mapping[str, CaseResult], resolves: Resolves) -> Resolves:
    """Return a decision that plans only those sets of which no verdict is known."""

    def decide(names: Sequence[str]) -> bool:
        result = known.get(MatrixCase(tuple(names)).name)
        return resolves(names) if result is None else result.outcome is not CaseOutcome.REFUSED

    return decide


def _fits(fits: set[frozenset[str]], made: Sequence[str], name: str) -> bool:
    return all(frozenset((name, other)) in fits for other in made)


def _new(todo: set[frozenset[str]], made: Sequence[str], name: str, strength: int) -> int:
    return sum(frozenset((name, *others)) in todo for others in combinations(made, strength - 1))
