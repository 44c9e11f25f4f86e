"""Judging a set of active features: choices, slots, conflicts, platforms, and the features' own checks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from string import Formatter

from mindspeed.engine.resolution.environment import version_in
from mindspeed.engine.resolution.planned_feature import PlanNote, ReasonKind
from mindspeed.engine.resolution.request_merge import LAUNCH
from mindspeed.engine.resolution.resolution_state import ResolutionState, because
from mindspeed.job.world import UnknownValue, size_name
from mindspeed.plugins.answers import answer, implements
from mindspeed.plugins.conditions import Condition, ConditionError, Failure, Loose, ModelCondition, failure, texts
from mindspeed.plugins.constraints import AUTO, Conflicts, RequiresAny, RequiresCapability, RequiresSlot
from mindspeed.plugins.fixes import Advice, Fix, GiveField, GiveOption, GiveSetting, RemoveFeature


def check_choices(state: ResolutionState) -> None:
    for name, constraint in state.constraints(RequiresAny):
        if not any(choice in state.active for choice in constraint.names):
            choices = ", ".join(constraint.names)
            text = f"{name} needs one of {choices}{because(constraint.reason)}"
            state.problem("MS205", text, (name,), Advice(f"add one of {choices} to the features"))
    for name, need in state.constraints(RequiresSlot):
        if need.slot not in state.holders:
            if (name, need.slot) in state.decided and getattr(state.args_of(name), need.setting, None) is not None:
                continue  # a name or auto, whose problem was reported
            text = f"{name} needs a feature for {need.slot}{because(need.reason)}"
            fix: Fix = (Advice(f"add one of {', '.join(state.holders_known(need.slot))} to the features"),)
            fix += (GiveSetting(f"{name}.{need.setting}", AUTO),) if need.setting else ()
            state.problem("MS205", text, (name,), fix)


def check_slots(state: ResolutionState) -> None:
    for slot, names in sorted(state.holders.items()):
        if len(names) > 1:
            state.problem("MS203", f"{_listing(names)} all hold the slot {slot}", tuple(names), _ways_out(state, names))


def check_conflicts(state: ResolutionState) -> None:
    seen: set[frozenset[str]] = set()
    for name, constraint in state.constraints(Conflicts):
        others = state.holders.get(constraint.name, [constraint.name])
        for other in others:
            pair = frozenset((name, other))
            if other == name or other not in state.active or pair in seen:
                continue
            seen.add(pair)
            names = tuple(sorted(pair))
            text = f"{names[0]} and {names[1]} exclude each other{because(constraint.reason)}"
            state.problem("MS202", text, names, _ways_out(state, names))


def check_capabilities(state: ResolutionState) -> None:
    for name, need in state.constraints(RequiresCapability):
        for holder in state.holders.get(need.slot, ()):
            if holder != name and need.capability not in state.specs[holder].provides:
                text = f"{name} needs {need.capability} of the feature for {need.slot}, and {holder} does not provide it"
                others = [n for n in state.holders_known(need.slot) if need.capability in state.specs[n].provides]
                fix: Fix = (Advice(f"use {' or '.join(others)} in its place"),) if others else ()
                state.problem("MS202", text + because(need.reason), (name, holder), (*fix, *_ways_out(state, (name, holder))))


def _ways_out(state: ResolutionState, names: Sequence[str]) -> Fix:
    """The smallest removals: for each side, the requested feature at the root of its chain."""
    return tuple(map(RemoveFeature, dict.fromkeys(state.root(name) for name in names)))


def check_sizes(state: ResolutionState) -> None:
    world = state.world
    product = world.tp * world.pp * world.cp
    if world.knows("world_size") and world.world_size % product:
        factors = f"tp x pp x cp = {world.tp} x {world.pp} x {world.cp} = {product}"
        text = f"world size {world.world_size} is not a multiple of {factors}"
        size = -(-world.world_size // product) * product
        launched = state.merged.world["world_size"].source == LAUNCH
        way = GiveOption("--nproc", size) if launched else GiveField("world_size", size)
        state.problem("MS302", text, (), (way, Advice("smaller parallel sizes")), ("world_size", "tp", "pp", "cp"))


def note_idle_features(state: ResolutionState) -> None:
    """A row for every active feature whose parallel size is 1: it is there and changes nothing."""
    for name in sorted(state.active):
        if size := state.specs[name].idle_size(state.world):
            state.rows.append(PlanNote("note", name, f"the {size_name(size)} is 1, so {name} changes nothing"))


def check_platforms(state: ResolutionState) -> None:
    platform = str(state.world.platform)
    for name in state.active:
        spec = state.specs[name]
        if spec.platforms and platform not in spec.platforms:
            text = f"{name} does not run on {platform}, only on {', '.join(sorted(spec.platforms))}"
            state.problem("MS208", text, (name,), RemoveFeature(state.root(name)))
        if spec.megatron and state.world.knows("megatron") and not version_in(state.world.megatron, spec.megatron):
            text = f"{name} needs megatron-core {spec.megatron}, this is {state.world.megatron}"
            fix = (Advice(f"install a megatron-core {spec.megatron}"), RemoveFeature(state.root(name)))
            state.problem("MS208", text, (name,), fix)


def check_operators(state: ResolutionState) -> None:
    """Add a row for every active feature with an operator that runs its plain-torch reference here.

    Under strict it is a problem, unless level 1 alone switched the feature on.
    """
    platform = str(state.world.platform)
    for name in sorted(state.active):
        missing = [op for op in state.specs[name].ops if not state.runs(op, platform)]
        if not missing:
            continue
        text = f"only the reference of {', '.join(missing)} runs on {platform}"
        if state.merged.strict and state.active[name].kind is not ReasonKind.LEVEL_ONE:
            fix = Advice("mindspeed ops list says why; mindspeed ops build builds those in C++")
            state.problem("MS515", f"{name}: {text}", (name,), fix)
        else:
            state.rows.append(PlanNote("note", name, f"{text}, which is slower; mindspeed ops list says why"))


def add_notes(state: ResolutionState) -> None:
    """A row for every sentence that an active feature says about its settings; none where a value is not known."""
    for name in sorted(state.active):
        feature, args = state.catalog.feature(name), state.args_of(name)
        if args is None or not implements(feature, "notes"):
            continue
        with suppress(UnknownValue):
            state.rows += [PlanNote("note", name, text) for text in answer(feature, "notes", args, state.world)]


def check_conditions(state: ResolutionState) -> None:
    """Ask every condition of the active features, of all of those on an unknown value a row."""
    for name, condition in state.constraints(Condition):
        args = state.args_of(name)
        other = state.args_of(condition.of) if condition.of in state.active else None
        if args is None or condition.otherwise == "skip" or (condition.of and other is None):
            continue
        try:
            found = failure(condition, name, args, state.world, other)
        except UnknownValue as unknown:
            state.not_checked(name, unknown, texts(condition, name, args, Loose(state.world), other)[0])
            continue
        except ConditionError as error:
            state.faulty_condition(name, condition, error)
            continue
        if found is not None:
            _report(state, name, found)


def _report(state: ResolutionState, name: str, found: Failure) -> None:
    condition = found.condition
    if condition.otherwise == "refuse":
        names = (name, condition.of) if condition.of else (name,)
        state.problem("MS304", f"{name}: {found.message}", names, found.fix, _named(name, condition))
    else:
        kind = "warning" if condition.otherwise == "warn" else "note"
        state.rows.append(PlanNote(kind, name, f"{name}: {found.message}"))


def _named(name: str, condition: Condition) -> Iterator[str]:
    """Yield the settings and the fields of the job that the message of a condition names."""
    owners = {"args": f"{name}.", "other": f"{condition.of}.", "world": ""}
    for _, field, _, _ in Formatter().parse(condition.message):
        owner, _, attribute = (field or "").partition(".")
        if owner in owners:
            yield f"{owners[owner]}{attribute}"


def note_model_conditions(state: ResolutionState) -> None:
    """List the conditions that only a live model can decide."""
    for name, condition in state.constraints(ModelCondition):
        state.rows.append(PlanNote("at-build", name, f"checked when the model is built: {condition.message}"))


def _listing(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"
