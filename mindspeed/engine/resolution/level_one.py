"""Optimization level 1: the features that it switches on, and those that make way for requested ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress

from mindspeed.engine.resolution.jobs import JobSet
from mindspeed.engine.resolution.planned_feature import Reason, ReasonKind
from mindspeed.engine.resolution.resolution_state import ResolutionState, because, plain_torch_only
from mindspeed.engine.resolution.setting_validation import flag
from mindspeed.engine.resolution.slot_selection import Root
from mindspeed.plugins import Conflicts, FeatureSpec, UnknownValue, World
from mindspeed.plugins.conditions import Condition, ConditionError, failure, obstacle
from mindspeed.problems import Text


def level_one(state: ResolutionState) -> Iterator[Root]:
    """Yield the features that level 1 switches on, and add a row for each that it does not."""
    for name in state.catalog.level_one:
        if name in state.merged.requested or name in state.merged.disabled:
            continue
        for left_out, jobs in _left_out(state, name, state.specs[name]):
            if left_out:
                state.note("left-out", name, left_out)
            else:
                ratios = "; ".join(one.comparison for one in state.measured(name))
                yield name, Reason(name, ReasonKind.LEVEL_ONE, note=ratios), jobs


def _left_out(state: ResolutionState, name: str, spec: FeatureSpec) -> Iterable[tuple[str, JobSet]]:
    """Return the reasons why level 1 does not switch a feature on, and in which jobs; '' where it does."""
    platform = str(state.world.platform)
    reason = ""
    if name in state.merged.without:
        layer = state.merged.without[name]
        reason = Text.of("removed by {source}", source=layer.source if layer.option else "--without")
    elif spec.platforms and platform not in spec.platforms:
        reason = Text.of("not for {platform}", platform=platform)
    elif spec.numerics.claim not in ("exact", "reordered"):
        reason = Text.of("its results are not bitwise equal: {claim}", claim=spec.numerics.claim)
    elif missing := [op for op in spec.ops if not state.has_variant(op, platform)]:
        reason = plain_torch_only(missing, platform)
    elif slower := state.slower_operators(name):
        reason = slower
    elif state.args_of(name) is None:
        reason = Text.of("its settings are invalid")
    return ((reason, state.scope),) if reason else refusals(state, name)


def refusals(state: ResolutionState, name: str, selecting: bool = False) -> Iterable[tuple[str, JobSet]]:
    """Return why a feature has nothing to do in a job or cannot run in it, also where a value is not known; else ''.

    With ``selecting`` only the conditions count that tell jobs of the feature from others.
    """
    args = state.args_of(name)
    constraints = state.specs[name].constraints
    if selecting:
        constraints = tuple(one for one in constraints if getattr(one, "selects", False))
    if args is None:
        return (("", state.scope),)

    def refusal(world: World) -> str:
        try:
            if found := obstacle(constraints, name, state.args_in(name, args, world), world):
                return found.message
        except UnknownValue as unknown:
            return Text.of("it depends on {option}, which is not set", option=flag(unknown.field))
        except ConditionError as error:
            return f"a condition of it {error}"
        return ""

    return state.values(None if state.is_single else state.key_of(name, "selecting" if selecting else "level 1"), refusal)


def leave_out_refused(state: ResolutionState) -> bool:
    """Remove the features that level 1 alone switched on and that cannot run with what active features set."""
    if not state.by_level_one:
        return False
    needed: dict[str, JobSet] = {}
    for name, jobs in state.where.items():
        for constraint in state.catalog.requires[name]:
            needed[constraint.name] = needed.get(constraint.name, 0) | jobs
    refused = [
        (name, refusal, here)
        for name, jobs in state.by_level_one.items()
        if name in state.where
        for refusal, found in refusals(state, name)
        if refusal and (here := found & jobs & state.where[name] & ~needed.get(name, 0))
    ]
    for name, refusal, jobs in refused:
        state.remove(name, jobs)
        state.note("left-out", name, refusal)
    return bool(refused)


def leave_out_excluded(state: ResolutionState) -> None:
    """Remove each feature that only level 1 switched on where an active one conflicts with it or leaves it nothing to do."""
    optional = _optional(state)
    if not any(optional.values()):
        return
    decided = {name: left for name, jobs in state.where.items() if (left := jobs & ~optional.get(name, 0))}
    for name, jobs in decided.items():
        for constraint in state.specs[name].constraints:
            if isinstance(constraint, Conflicts) and optional.get(constraint.name):
                here = jobs & optional[constraint.name] & state.holds(name, constraint)
                text = Text.of("{name} conflicts with it{because}", name=name, because=because(constraint.reason))
                _leave_out(state, optional, constraint.name, here, text, name)
    for name, jobs in list(optional.items()):
        for constraint in state.specs[name].constraints:
            if isinstance(constraint, Conflicts) and constraint.name in decided:
                here = jobs & decided[constraint.name] & state.holds(name, constraint)
                reason = because(constraint.reason)
                text = Text.of("it conflicts with {name}{because}", name=constraint.name, because=reason)
                _leave_out(state, optional, name, here, text, constraint.name)
            elif isinstance(constraint, Condition) and constraint.of in decided and constraint.otherwise != "warn":
                for message, found in _obstacles(state, name, constraint):
                    if message:
                        _leave_out(state, optional, name, found & jobs & decided[constraint.of], message, constraint.of)


def _obstacles(state: ResolutionState, name: str, condition: Condition) -> Iterable[tuple[str, JobSet]]:
    """Return why a condition on another active feature does not hold, and in which jobs; '' where it does or is not known."""
    args, other = state.args_of(name), state.args_of(condition.of)
    if args is None or other is None:
        return ()

    def found(world: World) -> str:
        with suppress(UnknownValue, ConditionError):
            both = state.args_in(name, args, world), world, state.args_in(condition.of, other, world)
            return said.message if (said := failure(condition, name, *both)) else ""
        return ""

    return state.values(None if state.is_single else state.key_of(name, id(condition), state.key_of(condition.of)), found)


def _optional(state: ResolutionState) -> dict[str, JobSet]:
    """Return the features that only level 1 brings in, by itself or for one another, and in which jobs."""
    optional = dict(state.by_level_one)
    before: dict[str, JobSet] = {}
    while before != optional:
        before = dict(optional)
        for name, jobs in state.where.items():
            for needed in state.catalog.requires[name]:
                if needed.name in optional:
                    optional[needed.name] &= ~(jobs & ~optional.get(name, 0) & state.holds(name, needed))
    return optional


def _leave_out(state: ResolutionState, optional: dict[str, JobSet], name: str, jobs: JobSet, text: str, cause: str) -> None:
    """Remove a feature that level 1 brought in from these jobs, with those of level 1 that require it.

    ``cause`` is the feature that it makes way for.
    """
    jobs &= optional[name]
    if not jobs:
        return
    optional[name] &= ~jobs
    state.remove(name, jobs)
    state.note("left-out", name, text)
    state.excluded_by[name] = cause
    for other in optional:
        for needed in state.catalog.requires[other]:
            if needed.name == name and (here := optional[other] & jobs & state.holds(other, needed)):
                _leave_out(state, optional, other, here, f"{name}, which it requires, is skipped", cause)
