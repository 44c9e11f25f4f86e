"""Judging a set of active features: choices, slots, conflicts, platforms, and the features' own checks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial, reduce
from itertools import product
from math import prod
from operator import or_
from string import Formatter
from typing import Any, Final

from mindspeed.engine.resolution.environment import version_in
from mindspeed.engine.resolution.fix_values import broken_conditions, with_values
from mindspeed.engine.resolution.jobs import JobSet
from mindspeed.engine.resolution.request_merge import LAUNCH
from mindspeed.engine.resolution.resolution_state import ResolutionState, because, plain_torch_only
from mindspeed.job.world import UnknownValue, World, size_name
from mindspeed.plugins.answers import answer
from mindspeed.plugins.conditions import Condition, ConditionError, Loose, ModelCondition, failure, is_met, texts
from mindspeed.plugins.constraints import AUTO, Conflicts, RequiresAny, RequiresCapability, RequiresSlot
from mindspeed.plugins.feature import FeatureArgs
from mindspeed.problems import Fix, Fixes, Text, filled, named_in

REFUSED: Final = "refused"
"""The answer of a condition that does not hold in one of several jobs, where nobody reads why."""


def check_choices(state: ResolutionState) -> None:
    for name, constraint, jobs in state.constraints(RequiresAny):
        if lacking := jobs & ~_union(state.where.get(choice, 0) for choice in constraint.names):
            reason = because(constraint.reason)
            names = ", ".join(constraint.names)
            if len(constraint.names) > 1:
                text = Text.of("{name} needs one of {names}{because}", name=name, names=names, because=reason)
            else:
                text = Text.of("{name} needs {names}{because}", name=name, names=names, because=reason)
            fix = filled(constraint.fix, name, lambda text: text) or tuple(map(Fix.add_feature, constraint.names))
            state.problem("MS205", text, (name,), fix, lacking)
    for name, need, jobs in state.constraints(RequiresSlot):
        if lacking := jobs & ~_union(state.holders.get(need.slot, {}).values()):
            if (name, need.slot) in state.decided and getattr(state.args_of(name), need.setting, None) is not None:
                continue  # a name or auto, whose problem was reported
            reason = because(need.reason)
            text = Text.of("{name} needs a feature for {slot}{because}", name=name, slot=need.slot, because=reason)
            fix = _ways_to_hold(state, need.slot)
            fix += (Fix.give_setting(f"{name}.{need.setting}", AUTO),) if need.setting else ()
            state.problem("MS205", text, (name,), fix + need.fix, lacking)


def _ways_to_hold(state: ResolutionState, slot: str) -> Fixes:
    """Add a feature that can hold a slot; where level 1 left all of them out, remove what they made way for."""
    known = state.holders_known(slot)
    if free := [name for name in known if name not in state.excluded_by]:
        return tuple(map(Fix.add_feature, free))
    return tuple(map(Fix.remove_feature, dict.fromkeys(state.excluded_by[name] for name in known)))


def check_slots(state: ResolutionState) -> None:
    for slot, holders in sorted(state.holders.items()):
        names, shared = list(holders), _shared(holders.values())
        if shared:
            text = Text.of(
                "{names} hold the slot {slot}, a role that only one feature can have", names=_listing(names), slot=slot
            )
            state.problem("MS203", text, tuple(names), _ways_out(names), shared)


def check_conflicts(state: ResolutionState) -> None:
    for name, constraint, jobs in state.constraints(Conflicts):
        others = state.holders.get(constraint.name, {constraint.name: state.where.get(constraint.name, 0)})
        for other, where in others.items():
            if other == name or not (both := jobs & where):
                continue
            names = tuple(sorted((name, other)))
            if not state.is_single or names not in [problem.features for problem in state.problems if problem.code == "MS202"]:
                reason = because(constraint.reason)
                text = Text.of("{one} conflicts with {other}{because}", one=names[0], other=names[1], because=reason)
                fix = filled(constraint.fix, name, lambda text: text)
                state.problem("MS202", text, names, fix + _ways_out(names), both)


def check_capabilities(state: ResolutionState) -> None:
    for name, need, jobs in state.constraints(RequiresCapability):
        for holder, where in state.holders.get(need.slot, {}).items():
            both = jobs & where
            if both and holder != name and need.capability not in state.specs[holder].provides:
                text = Text.of(
                    "{holder} does not support {capability}, which {name} needs{because}",
                    holder=holder,
                    capability=need.capability.replace("-", " "),
                    name=name,
                    because=because(need.reason),
                )
                others = [n for n in state.holders_known(need.slot) if need.capability in state.specs[n].provides]
                removal = state.removal(holder)
                fix: Fixes = tuple(Fix.together((removal, Fix.add_feature(other))) for other in others)
                fix += _ways_out((name, holder))
                state.problem("MS202", text, (name, holder), fix, both)


def _union(sets: Iterable[JobSet]) -> JobSet:
    return reduce(or_, sets, 0)


def _shared(sets: Iterable[JobSet]) -> JobSet:
    """Return the jobs that are in more than one of these sets."""
    seen = shared = 0
    for jobs in sets:
        shared |= seen & jobs
        seen |= jobs
    return shared


def _ways_out(names: Iterable[str]) -> Fixes:
    """The smallest removals: each side alone."""
    return tuple(map(Fix.remove_feature, names))


def check_sizes(state: ResolutionState) -> None:
    for has_remainder, jobs in state.values("sizes", _has_remainder):
        if has_remainder:
            text, fix = _remainder(state) if state.is_single else ("", ())
            state.problem("MS302", text, (), fix, jobs, ("world_size", "tp", "pp", "cp"))


def check_moe_layers(state: ResolutionState) -> None:
    """Report more layers with experts than layers; those of a pattern are checked with it."""
    for is_excess, jobs in state.values("moe layers", _has_too_many_moe_layers):
        if is_excess:
            given, layers = state.world.moe_layers, state.world.num_layers
            text = Text.of("moe_layers is {given}, but the model has {layers} layers", given=given, layers=layers)
            fix = (Fix.give_field("moe_layers", layers), Fix.drop_field("moe_layers"))
            state.problem("MS302", text, (), fix, jobs, ("moe_layers", "num_layers"))


def _has_too_many_moe_layers(world: World) -> bool:
    return (
        world.knows("moe_layers") and world.knows("num_layers") and world.moe_layers > world.num_layers and not world.is_hybrid
    )


def _has_remainder(world: World) -> bool:
    return world.knows("world_size") and bool(world.world_size % (world.tp * world.pp * world.cp))


def _remainder(state: ResolutionState) -> tuple[str, Fixes]:
    """Return message and fix for a number of processes that the parallel sizes do not divide."""
    given, world = state.merged.world, state.world
    layout = world.tp * world.pp * world.cp
    factors = f"tp x pp x cp = {world.tp} x {world.pp} x {world.cp} = {layout}"
    fewer = world.world_size // layout * layout
    numbers = (fewer + layout, fewer) if fewer else (layout,)
    ranks = min(numbers, key=lambda number: broken_conditions(state, {"world_size": number}))
    way = Fix.give_option("--nproc", ranks) if given["world_size"].source == LAUNCH else Fix.give_field("world_size", ranks)
    smaller = (
        Fix.give_field(
            name, next(number for number in range(size - 1, 0, -1) if world.world_size % (layout // size * number) == 0)
        )
        for name in ("tp", "pp", "cp")
        if (size := getattr(world, name)) > 1 and world.world_size % (layout // size) == 0
    )
    fix = (way, *(tuple(smaller) or _smaller_layout(world)))
    return Text.of("world size {ranks} is not a multiple of {factors}", ranks=world.world_size, factors=factors), fix


def _smaller_layout(world: World) -> Fixes:
    """Return the largest layout of sizes that are not greater, and that fills the ranks."""
    names = ("tp", "pp", "cp")
    shares = [number for number in range(1, world.world_size + 1) if world.world_size % number == 0]
    layouts = product(*([number for number in shares if number <= getattr(world, name)] for name in names))
    sizes = max((sizes for sizes in layouts if world.world_size % prod(sizes) == 0), key=prod)
    return (
        Fix.together(
            Fix.give_field(name, size) for name, size in zip(names, sizes, strict=True) if getattr(world, name) != size
        ),
    )


def check_given_fields(state: ResolutionState) -> None:
    """Report every field of the job that the user gives and that an active feature sets to another value."""
    for name in sorted(state.catalog.describing.intersection(state.active)):
        for found, jobs in state.contradictions(name):
            for field, value in found:
                given = state.merged.world[field]
                text = Text.of(
                    "{name} sets {field} to {value}, but {given} is given",
                    name=name,
                    field=field,
                    value=value,
                    given=given.value,
                )
                fix = (Fix.drop_field(field, given.source), Fix.remove_feature(name))
                state.problem("MS304", text, (name,), fix, jobs & state.where[name], (field,))


def check_platforms(state: ResolutionState) -> None:
    platform = str(state.world.platform)
    for name in state.active:
        spec = state.specs[name]
        if spec.platforms and platform not in spec.platforms:
            others = ", ".join(sorted(spec.platforms))
            text = Text.of("{name} does not run on {platform}, only on {others}", name=name, platform=platform, others=others)
            state.problem("MS208", text, (name,), Fix.remove_feature(name), state.where[name])
        if spec.megatron and state.world.knows("megatron") and not version_in(state.world.megatron, spec.megatron):
            version = state.world.megatron
            text = Text.of(
                "{name} needs megatron-core {range}, but the version is {version}",
                name=name,
                range=spec.megatron,
                version=version,
            )
            fix = (Fix.advise(Text.of("install megatron-core {range}", range=spec.megatron)), Fix.remove_feature(name))
            state.problem("MS208", text, (name,), fix, state.where[name])


def check_operators(state: ResolutionState) -> None:
    """Add a row for every active feature with an operator that runs its plain-torch reference here, or that torch beats.

    Under strict a reference is a problem, unless level 1 alone switched the feature on.
    """
    platform = str(state.world.platform)
    for name in [name for name in state.names if state.specs[name].ops and name in state.active]:
        if slower := state.slower_operators(name):
            state.note("note", name, slower)
        missing = [op for op in state.specs[name].ops if not state.runs(op, platform)]
        if not missing:
            continue
        text = plain_torch_only(missing, platform)
        requested = state.where[name] & ~state.by_level_one.get(name, 0)
        if state.merged.strict and requested:
            fix = Fix.advise("mindspeed ops build, or see mindspeed ops list for the cause")
            state.problem("MS515", Text.of("{name}: {text}", name=name, text=text), (name,), fix, requested)
        else:
            state.note("note", name, Text.of("{text}, which is slower; mindspeed ops list shows why", text=text))


def add_notes(state: ResolutionState) -> None:
    """Add a row for every condition that only a live model can decide, every active feature whose parallel size is 1, and
    every sentence that an active feature says about its settings; none where a value is not known."""
    for name, condition, _ in state.constraints(ModelCondition):
        requirement = Text.plain(condition.message)
        state.note("at-build", name, Text.of("checked when the model is built: {requirement}", requirement=requirement))
    for name in state.names:
        if name in state.active and (size := state.specs[name].idle_size(state.world)):
            text = Text.of("the {size} is 1, so {name} changes nothing", size=Text.plain(size_name(size)), name=name)
            state.note("note", name, text)
    for name in sorted(state.catalog.noting.intersection(state.active)):
        feature, args = state.catalog.feature(name), state.args_of(name)
        if args is None:
            continue
        with suppress(UnknownValue):
            for text in answer(feature, "notes", args, state.world):
                state.note("note", name, text)


def check_conditions(state: ResolutionState) -> None:
    """Ask every condition of the active features; one on an unknown value is a row."""
    for name, condition in state.declared[Condition]:
        if condition.otherwise == "skip" or (condition.otherwise != "refuse" and not state.is_single):
            continue
        active = state.where.get(name, state.scope)
        active &= state.where.get(condition.of, 0) if condition.of else active
        args, other = state.args_of(name), state.args_of(condition.of) if condition.of in state.active else None
        if args is None or not active:
            continue
        key = None if state.is_single else state.key_of(name, id(condition), condition.of and state.key_of(condition.of))
        for said, jobs in state.values(key, partial(_asked, state, name, condition, args, other)):
            if (here := jobs & active) and said is not None:
                _report(state, name, condition, said, here)


def _asked(
    state: ResolutionState, name: str, condition: Condition, args: FeatureArgs, other: FeatureArgs | None, world: World
) -> Any:
    """Ask one condition about one job: None where it holds, else its failure, the unknown field, or the author's error."""
    own = state.args_in(name, args, world)
    others = None if other is None else state.args_in(condition.of, other, world)
    try:
        if state.is_single:
            return failure(condition, name, own, world, others)
        return None if is_met(condition, own, world, others) else REFUSED
    except UnknownValue as unknown:
        return unknown.field, texts(condition, name, own, Loose(world), others)[0] if state.is_single else condition.name
    except ConditionError as error:
        return error


def _report(state: ResolutionState, name: str, condition: Condition, said: Any, jobs: JobSet) -> None:
    if isinstance(said, tuple):
        field, what = said
        state.not_checked(name, field, what, jobs)
    elif isinstance(said, ConditionError):
        state.faulty_condition(name, condition, said, jobs)
    elif said is REFUSED:
        state.refused |= jobs
    elif condition.otherwise == "refuse":
        if _has_conflict(state, name) and state.is_due_to_features(name, condition):
            return  # the conflict with the feature that makes the job so is reported
        names = (name, condition.of) if condition.of else (name,)
        fix = said.fix if state.suggestions == "none" else with_values(state, name, condition, said.fix)
        about = (*_named(name, condition), *named_in(said.fix))
        text = Text.of("{name}: {text}", name=name, text=said.message)
        state.problem("MS304", text, names, fix, jobs, about, condition.name)
    else:
        state.note("warning" if condition.otherwise == "warn" else "note", name, said.message)


def _has_conflict(state: ResolutionState, name: str) -> bool:
    return any(name in problem.features for problem in state.problems if problem.code in ("MS202", "MS203", "MS212"))


def _named(name: str, condition: Condition) -> Iterator[str]:
    """Yield the settings and the fields of the job that the message of a condition names."""
    owners = {"args": f"{name}.", "other": f"{condition.of}.", "world": ""}
    for _, field, _, _ in Formatter().parse(condition.message):
        owner, _, attribute = (field or "").partition(".")
        if owner in owners:
            yield f"{owners[owner]}{attribute}"


def _listing(names: Sequence[str]) -> Text:
    others = ", ".join(names[:-1])
    return Text.of("{names} and {last} both" if len(names) == 2 else "{names} and {last} all", names=others, last=names[-1])
