"""Following the fixes of refused requests: each round applies the first alternative of every problem."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from mindspeed import registry
from mindspeed.engine.resolution.applied_fixes import JobRequest, applied
from mindspeed.engine.resolution.environment import made_up
from mindspeed.engine.resolution.request import Layer, parse_assignments
from mindspeed.problems import Fix, MindSpeedError, Problem
from tests.drawn_jobs import draw
from tests.features.resolving import MODEL
from tests.features.test_requests import CLAIMS, read_request

ROUNDS: Final = 3
KNOWN_TO_USERS: Final = {
    "adaptive-recompute.budget_mb": 1e6,
    "shared-attention-mask.width": 4,
    "shared-attention-mask.prefix": 4,
}
"""Values that fixes leave to the user, because every value mends the problem."""
PLATFORMS: Final = ("cpu", "npu", "cuda")
Mistake = tuple[str, tuple[str, ...], str]
"""What makes two problems the same one: code, features, and the sentence without its numbers."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a request: ``accepted``, ``nothing mends it``, or what went wrong; and the rounds that it took."""

    kind: str
    rounds: int
    trail: tuple[str, ...] = ()


def mistake(problem: Problem) -> Mistake:
    """Return what tells a problem from others, also when its numbers have changed."""
    return problem.code, problem.features, re.sub(r"\d+", "N", problem.message)


def problems_of(request: JobRequest) -> tuple[Problem, ...]:
    """Return every problem of a request; none where it is accepted."""
    try:
        registry.resolve(list(request.layers), request.environment)
    except MindSpeedError as error:
        return error.problems
    return ()


def followed(request: JobRequest, problems_of: Callable[[JobRequest], Sequence[Problem]] = problems_of) -> Outcome:
    """Apply the first alternative of every problem, and again, until the request is accepted or says that nothing mends it."""
    trail: list[str] = []
    mended: set[Mistake] = set()
    before: set[Mistake] = set()
    for rounds in range(ROUNDS + 1):
        problems = problems_of(request)
        trail += [f"{rounds}: {problem.code} {problem.message} | {problem.fix_text}" for problem in problems]
        if not problems:
            return Outcome("accepted", rounds, tuple(trail))
        if any(is_final(problem) for problem in problems):
            return Outcome("nothing mends it", rounds, tuple(trail))
        now = {*map(mistake, problems)}
        mended |= before - now
        if back := mended & now:
            return Outcome("returned", rounds, (*trail, f"returned: {back}"))
        before = now
        start = request
        for problem in problems:
            first = next((fix for fix in map(with_value, problem.fix) if applied(fix, start) is not None), None)
            if first is None:
                return Outcome("no change", rounds, (*trail, f"no change: {problem.fix}"))
            request = applied(first, request) or request
    return Outcome("not in three rounds", ROUNDS, tuple(trail))


def left_by_alternatives(request: JobRequest) -> list[str]:
    """Return the alternatives that mend their problem neither alone nor after the first ones of the problems before it."""
    left, after = [], request
    for problem in problems_of(request):
        for fix in map(with_value, problem.fix):
            changed = [one for one in (applied(fix, request), applied(fix, after)) if one is not None]
            if changed and all(mistake(problem) in map(mistake, untried(one)) for one in changed):
                left.append(f"{problem.code} {problem.message} | {fix}")
        first = next((fix for fix in map(with_value, problem.fix) if applied(fix, request) is not None), None)
        after = (applied(first, after) if first is not None else None) or after
    return left


def untried(request: JobRequest) -> tuple[Problem, ...]:
    """Return the problems of a request without fixes."""
    return registry.judge(request, "none")[1]


def with_value(fix: Fix) -> Fix:
    """Return a fix with the value that a user gives it."""
    return replace(fix, value=KNOWN_TO_USERS.get(fix.name)) if fix.value is None else fix


def is_final(problem: Problem) -> bool:
    """Return whether a problem says that no change of the request mends it."""
    return any(fix.verb == "nothing" for fix in problem.fix)


def drawn(seed: int) -> JobRequest:
    """Return a request of two to five features with the model, layout and settings of a seed, whether accepted or not."""
    job = draw(seed, lambda job: True)
    names = job.features[: 2 + seed % 4]
    given = [f"{key}={value}" for key, value in job.settings.items() if key.partition(".")[0] in names]
    layer = Layer("command line", features=names, settings=parse_assignments(given, "--set"), world=job.world)
    return JobRequest((layer,), made_up(PLATFORMS[seed % 3], "0.16.1"))


def written() -> Iterator[tuple[str, JobRequest]]:
    """Yield the refused requests of ``tests/features/requests.txt``."""
    for rows in CLAIMS.values():
        for text, answers in rows:
            if answers and answers[0].startswith("MS"):
                names, settings, fields = read_request(text)
                layer = Layer("command line", features=tuple(names), settings=settings, world=MODEL | fields)
                yield text, JobRequest((layer,), made_up("cpu", "0.16.1"))
