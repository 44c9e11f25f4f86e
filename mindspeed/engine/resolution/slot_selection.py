"""Selection of the holder of a required slot, by a setting that names it or leaves the choice to mindspeed.

Pure: the features that could hold it are judged by what they declare, their own checks, conflicts and costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from mindspeed.engine.resolution.environment import version_in
from mindspeed.engine.resolution.jobs import JobSet, NotUniform
from mindspeed.engine.resolution.planned_feature import DEFAULT, Reason, ReasonKind
from mindspeed.engine.resolution.resolution_state import ResolutionState
from mindspeed.engine.resolution.setting_validation import flag
from mindspeed.job.world import UnknownValue, World
from mindspeed.plugins.answers import answer, implements
from mindspeed.plugins.conditions import conditions, failure
from mindspeed.plugins.constraints import AUTO, Conflicts, Cost, Relation, RequiresCapability, RequiresSlot
from mindspeed.problems import Fix, MindSpeedError

Root = tuple[str, Reason, JobSet]
"""A feature that becomes active, with the reason and the jobs."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A feature that could hold a slot: its cost, or why it cannot, or the values needed to decide."""

    name: str
    cost: Cost | None = None
    refusal: str = ""
    unknown: tuple[str, ...] = ()


def select_holders(state: ResolutionState) -> Iterator[Root]:
    """Every feature that is named by a setting of an active one, or chosen for it, with its reason; each is given once."""
    for name in state.catalog.choosers:
        for need in state.specs[name].constraints if name in state.active else ():
            if isinstance(need, RequiresSlot) and need.setting and (name, need.slot) not in state.decided:
                state.decided.add((name, need.slot))
                wanted = getattr(state.args_of(name), need.setting, None)
                jobs = state.where[name] & state.holds(name, need) if wanted is not None else 0
                if jobs:
                    yield from (
                        _automatic(state, name, need, jobs) if wanted == AUTO else _named(state, name, need, str(wanted), jobs)
                    )


def _named(state: ResolutionState, name: str, need: RequiresSlot, wanted: str, jobs: JobSet) -> Iterator[Root]:
    setting, source = _setting(state, name, need)
    if not state.known(wanted, f"{setting} ({source})"):
        return
    if need.slot not in state.specs[wanted].slots:
        text = f"{setting} names {wanted}, which is not a feature for {need.slot}"
        known = f"or {', '.join(state.holders_known(need.slot))}"
        state.problem("MS342", text, (name,), Fix.give_setting(setting, AUTO, known), jobs)
        return
    others = {other: both for other, held in _holders(state, need.slot).items() if other != wanted and (both := held & jobs)}
    for other, both in others.items():
        text = f"{setting} ({source}) names {wanted}, but {other} is already active in that role"
        fix = (Fix.remove_feature(other), Fix.give_setting(setting, other))
        state.problem("MS342", text, (name, other), fix, both)
        jobs &= ~both
    if not jobs:
        return
    if removal := state.merged.removal(wanted):
        text = f"{setting} names {wanted}, but {removal[1]} removes {wanted}"
        state.problem(
            removal[0],
            text,
            (name, wanted),
            (
                *_others(state, name, need, wanted),
                *((Fix.keep_feature(wanted),) if removal[0] == "MS210" else ()),
            ),
            jobs,
            (setting,),
        )
    else:
        yield wanted, Reason(wanted, ReasonKind.NAMED, name, need.setting, source=source), jobs


def _others(state: ResolutionState, name: str, need: RequiresSlot, wanted: str = "") -> tuple[Fix, ...]:
    """Return the fixes that name another feature for the slot."""
    others = (other for other in state.holders_known(need.slot) if other != wanted)
    return tuple(Fix.give_setting(f"{name}.{need.setting}", other) for other in others)


def _automatic(state: ResolutionState, name: str, need: RequiresSlot, jobs: JobSet) -> Iterator[Root]:
    setting, _ = _setting(state, name, need)
    here = [(other, both) for other, held in _holders(state, need.slot).items() if (both := held & jobs)]
    if here:
        if here[0][1] != jobs:
            raise NotUniform(here[0][1])
        judged = _judged(state, need.slot, state.world) if state.is_single else ()
        state.note("choice", name, f"{setting} is auto, but {here[0][0]} is already active, so no other feature is chosen")
        for candidate in judged:
            if candidate.name != here[0][0]:
                state.note("choice", name, _line(candidate))
        return
    for judged, found in state.values(("auto", name, need.slot), partial(_judged, state, need.slot)):
        if (asked := found & jobs) == jobs:
            yield from _chosen(state, name, need, judged, jobs)
        elif asked:
            raise NotUniform(asked)


def _judged(state: ResolutionState, slot: str, world: World) -> tuple[Candidate, ...]:
    """Judge every feature that could hold a slot in one job."""
    return tuple(_candidate(state, other, slot, world) for other in state.holders_known(slot))


def _chosen(state: ResolutionState, name: str, need: RequiresSlot, judged: Sequence[Candidate], jobs: JobSet) -> Iterator[Root]:
    setting, source = _setting(state, name, need)
    if unknown := tuple(dict.fromkeys(field for candidate in judged for field in candidate.unknown)):
        text = f"{setting} is auto, but the choice needs values that are not set: {', '.join(unknown)}"
        given = Fix.together(map(Fix.give_field, unknown)) if len(unknown) > 1 else Fix.give_field(unknown[0])
        fix = (given, *_others(state, name, need))
        state.problem("MS341", text, (name,), fix, jobs)
        return
    eligible = sorted((candidate.cost.amounts, candidate.name, candidate) for candidate in judged if candidate.cost is not None)
    if not eligible:
        reasons = "; ".join(f"{candidate.name}: {candidate.refusal}" for candidate in judged)
        text = f"{setting} is auto, but no feature can be chosen: {reasons}"
        state.problem("MS341", text, (name,), (*_others(state, name, need), Fix.remove_feature(name)), jobs, (setting,))
        return
    best = eligible[0][2]
    why = "costs least" if len(eligible) > 1 else "alone can"
    state.note("choice", name, f"{setting} is auto, so {best.name} is chosen, which {why}: {_text(best)}")
    for *_, candidate in eligible[1:]:
        state.note("choice", name, _line(candidate))
    for candidate in judged:
        if candidate.cost is None:
            state.note("choice", name, _line(candidate))
    state.give(best.name, best.cost.settings if best.cost else {}, f"{setting}=auto")
    note = f"{why}: {_text(best)}"
    yield best.name, Reason(best.name, ReasonKind.CHOSEN, name, need.setting, source=source, note=note), jobs


def _candidate(state: ResolutionState, name: str, slot: str, world: World) -> Candidate:
    spec, platform = state.specs[name], str(world.platform)
    if removal := state.merged.removal(name):
        return Candidate(name, refusal=f"removed by {removal[1]}")
    if spec.level > state.merged.level:
        return Candidate(
            name, refusal=f"its optimization level is {spec.level}, but the level of this job is {state.merged.level}"
        )
    if spec.platforms and platform not in spec.platforms:
        return Candidate(name, refusal=f"it does not run on {platform}")
    if spec.megatron and world.knows("megatron") and not version_in(world.megatron, spec.megatron):
        return Candidate(name, refusal=f"it needs megatron-core {spec.megatron}")
    if excluded := next(_excluded(state, name, slot), ""):
        return Candidate(name, refusal=f"it conflicts with {excluded}")
    if (args := state.args_of(name)) is None:
        return Candidate(name, refusal="its settings are invalid")
    feature = state.catalog.feature(name)
    if not implements(feature, "cost"):
        return Candidate(name, refusal="it declares no cost")
    try:
        cost = answer(feature, "cost", args, world)
        args = state.models[name](**(dict(cost.settings) | args.model_dump(exclude_unset=True)))
        own = [condition for condition in conditions(spec.constraints) if not condition.of]
        for found in filter(None, (failure(condition, name, args, world) for condition in own)):
            return Candidate(name, refusal=found.message)
    except UnknownValue as unknown:
        return Candidate(name, unknown=unknown.fields)
    except MindSpeedError as error:
        return Candidate(name, refusal=f"its cost could not be computed: {error.problems[0].message}")
    except Exception as error:  # a plugin's formula may fail in any way; the message must name the plugin
        return Candidate(name, refusal=f"its cost or one of its checks raised an error: {type(error).__name__}: {error}")
    return Candidate(name, cost)


def _excluded(state: ResolutionState, name: str, slot: str) -> Iterator[str]:
    """Active features that exclude a candidate, by its declaration or by theirs, or need what it does not provide."""
    spec = state.specs[name]
    mine = {c.name for c in spec.constraints if isinstance(c, Conflicts) and state.holds(name, c)}
    for other in sorted(state.active):
        declared = state.specs[other].constraints
        theirs: list[Relation] = [c for c in declared if isinstance(c, Conflicts) and c.name in (name, slot)]
        theirs += [
            c for c in declared if isinstance(c, RequiresCapability) and c.slot == slot and c.capability not in spec.provides
        ]
        if other in mine or mine & state.held_slots(other).keys() or any(state.holds(other, c) for c in theirs):
            yield other


def _holders(state: ResolutionState, slot: str) -> dict[str, JobSet]:
    held = {name: state.where[name] & state.held_slots(name).get(slot, 0) for name in sorted(state.active)}
    return {name: jobs for name, jobs in held.items() if jobs}


def _setting(state: ResolutionState, name: str, need: RequiresSlot) -> tuple[str, str]:
    """The setting that chooses, and where its value is from."""
    given = state.merged.settings.get(name, {}).get(need.setting)
    return f"{name}.{need.setting}", given.source if given is not None else DEFAULT


def _line(candidate: Candidate) -> str:
    if candidate.unknown:
        return f"{candidate.name}: unknown without {' and '.join(map(flag, candidate.unknown))}"
    return f"{candidate.name}: {_text(candidate) if candidate.cost is not None else f'cannot, {candidate.refusal}'}"


def _text(candidate: Candidate) -> str:
    cost = candidate.cost or Cost((), "")
    settings = ", ".join(f"{key}={value}" for key, value in cost.settings.items())
    return f"{cost.text}, with {settings}" if settings else cost.text
