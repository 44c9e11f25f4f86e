"""Trying the fixes of a refused request: a fix that is printed mends its problem."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from mindspeed.engine.resolution.applied_fixes import JobRequest, applied
from mindspeed.engine.resolution.resolution_state import Suggestions
from mindspeed.problems import Fix, Problem

Judge = Callable[[JobRequest, Suggestions], Sequence[Problem]]
"""Return the problems of a request, with these fixes; none where it is accepted."""
Mistake = tuple[object, ...]
"""Identity of a problem, which stays when its values change."""

_UNTRIED: Final = ("run-command", "advice", "nothing")
"""Kinds of fixes that change no request."""
_NOTHING: Final = Fix.nothing("no single change of the request does")


def with_tried_fixes(problems: Sequence[Problem], request: JobRequest, judge: Judge, ahead: int = 1) -> list[Problem]:
    """Return problems whose alternatives each mend them, and whose first ones, applied together, bring no new problem.

    An alternative that does not mend is removed, and those that bring the fewest new problems come first. Where no declared
    one is left, or all bring new problems, the best of further ones is added: those of the other problems, those of the
    request after them, settings at fault removed, requested features removed. Of those that bring as many, the first one
    leaves the fewest problems a round later; ``ahead`` is the number of such rounds.
    """
    found = Counter(map(_mistake, problems))
    trial = _Trial(request, judge, ahead, found, Counter(found), request, [])
    return [trial.tried(problem) for problem in problems]


def one_of_each(problems: Iterable[Problem]) -> Iterator[Problem]:
    """Yield one problem for features whose equal rules do not hold of the same values, and that the same fixes mend."""
    groups: dict[tuple[object, ...], list[Problem]] = {}
    for number, problem in enumerate(problems):
        rule = problem.rule or number
        groups.setdefault((problem.code, rule, problem.facts, problem.fix), []).append(problem)
    for first, *others in groups.values():
        names = tuple(dict.fromkeys(name for one in others for name in one.features))
        row = (f"the same rule is that of {', '.join(names)}",) if names else ()
        yield replace(first, features=(*first.features, *names), chain=(*first.chain, *row))


def _mistake(problem: Problem) -> Mistake:
    return problem.code, problem.features, problem.rule or tuple(fact.name for fact in problem.facts)


@dataclass(slots=True)
class _Trial:
    """Hold the request, its problems by kind, those to come, and the request with the fixes ``chosen`` for those before."""

    request: JobRequest
    judge: Judge
    ahead: int
    found: Counter[Mistake]
    pending: Counter[Mistake]
    mended: JobRequest
    chosen: list[Fix]

    def tried(self, problem: Problem) -> Problem:
        self.pending[_mistake(problem)] -= 1
        present = self._problems(self.mended)[_mistake(problem)]
        ranks = self._ranked(problem, present, problem.fix)
        ranks |= {fix: 0 for fix in problem.fix if fix.verb == "rename"}  # what is meant may not be loaded, or not fit yet
        is_unvalued = any(_is_open(fix) and fix.verb not in _UNTRIED for fix in problem.fix)
        for further in (self._of_others, self._after_others, self._drops, self._removals):
            if min(ranks.values(), default=not is_unvalued):
                more = self._ranked(problem, present, [fix for fix in further(problem) if fix not in ranks])
                ranks |= {fix: more[fix] for fix in sorted(more, key=more.__getitem__)[:1]}
        if not ranks and not present:
            ranks = {Fix.together(self.chosen): 0}
        fewest = min(ranks.values(), default=0)
        best = [fix for fix, left in ranks.items() if left == fewest]
        if fewest and self.ahead and len(best) > 1:
            later = {fix: self._left_a_round_later(fix, problem) for fix in best}
            best.sort(key=later.__getitem__)
        if best:
            self.chosen.append(best[0])
            self.mended = applied(best[0], self.mended) or self.mended
        alternatives = [fix for fix in problem.fix if fix in ranks or _is_open(fix)]
        alternatives += [fix for fix in best if fix not in alternatives]
        alternatives.sort(key=lambda fix: (ranks.get(fix, 0), fix not in best[:1] and fewest > 0))
        return replace(problem, fix=tuple(alternatives) or (_NOTHING,))

    def _ranked(self, problem: Problem, present: int, fixes: Iterable[Fix]) -> dict[Fix, int]:
        """Return the fixes that mend a problem, each with the number of problems that it leaves beside those to come.

        A fix mends it alone, or after the fixes of the problems before it, where it is ``present``. One that leaves another
        problem of the same code and features in its place does not mend.
        """
        mistake, ranked, known = _mistake(problem), dict[Fix, int](), set[Fix]()
        for fix in fixes:
            if _is_open(fix) or _plain(fix) in known or (changed := applied(fix, self.request)) is None:
                continue
            known.add(_plain(fix))
            left = self._problems(applied(fix, self.mended) or self.mended)
            new = left - self.pending
            if problem.features and any(other[:2] == mistake[:2] and other not in self.found for other in new):
                continue
            if left[mistake] < present or self._problems(changed)[mistake] < self.found[mistake]:
                ranked[fix] = new.total()
        return ranked

    def _left_a_round_later(self, fix: Fix, problem: Problem) -> int:
        """Return the number of problems after a fix of a problem and the first alternatives of what it leaves.

        A problem with any alternative that adds a feature of the first one counts too: with the feature the first one returns.
        """
        request, returning = applied(fix, self.mended) or self.mended, 0
        for other in with_tried_fixes(self.judge(request, "declared"), request, self.judge, self.ahead - 1):
            returning += any(one.verb == "add-feature" and one.name in problem.features for one in other.fix)
            request = next((changed for one in other.fix if (changed := applied(one, request)) is not None), request)
        return self._problems(request).total() + returning

    def _problems(self, request: JobRequest) -> Counter[Mistake]:
        return Counter(map(_mistake, self.judge(request, "none")))

    def _of_others(self, problem: Problem) -> Iterable[Fix]:
        return self.chosen

    def _after_others(self, problem: Problem) -> Iterable[Fix]:
        """Yield the fixes of a problem in the request as it is after the fixes of the others, and in the request itself."""
        for request in (self.mended, self.request):
            for other in self.judge(request, "also removals"):
                yield from other.fix if _mistake(other) == _mistake(problem) else ()

    def _drops(self, problem: Problem) -> Iterable[Fix]:
        """Yield the removal of each setting at fault."""
        return (Fix.drop_setting(fact.name) for fact in problem.facts if "." in fact.name)

    def _removals(self, problem: Problem) -> Iterable[Fix]:
        return map(Fix.remove_feature, dict.fromkeys(name for layer in self.request.layers for name in layer.features))


def _is_open(fix: Fix) -> bool:
    """Return whether a fix cannot be tried: it changes no request, or leaves a value to the user."""
    if fix.steps:
        return any(map(_is_open, fix.steps))
    return fix.verb in _UNTRIED or (fix.verb in ("give-field", "give-setting") and fix.value is None)


def _plain(fix: Fix) -> Fix:
    """Return a fix without what only its reader needs."""
    return replace(fix, note="", or_more=False, steps=tuple(map(_plain, fix.steps)))
