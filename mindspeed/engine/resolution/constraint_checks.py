"""Judging a set of active features: choices, slots, conflicts, platforms, and the features' own checks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from mindspeed.engine.resolution.environment import version_in
from mindspeed.engine.resolution.planned_feature import PlanNote
from mindspeed.engine.resolution.request_merge import LAUNCH
from mindspeed.engine.resolution.resolution_state import ResolutionState, because
from mindspeed.job.world import UnknownValue, World, size_name
from mindspeed.plugins.constraints import Check, Conflicts, RequiresAny, RequiresCapability, RequiresSlot
from mindspeed.plugins.feature import FeatureArgs
from mindspeed.plugins.problems import Problem


def check_choices(state: ResolutionState) -> None:
    for name, constraint in state.constraints(RequiresAny):
        if not any(choice in state.active for choice in constraint.names):
            choices = ", ".join(constraint.names)
            text = f"{name} needs one of {choices}{because(constraint.reason)}"
            state.problem("MS205", text, (name,), f"add one of {choices} to the features")
    for name, need in state.constraints(RequiresSlot):
        if need.slot not in state.holders:
            if (name, need.slot) in state.decided and getattr(state.args_of(name), need.setting, None) is not None:
                continue  # a name or auto, whose problem was reported
            text = f"{name} needs a feature for {need.slot}{because(need.reason)}"
            fix = f"add one of {', '.join(state.holders_known(need.slot))} to the features"
            state.problem("MS205", text, (name,), f"{fix}, or --set {name}.{need.setting}=auto" if need.setting else fix)


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
                fix = f"use {' or '.join(others)} in its place, or " if others else ""
                state.problem("MS202", text + because(need.reason), (name, holder), f"{fix}{_ways_out(state, (name, holder))}")


def _ways_out(state: ResolutionState, names: Sequence[str]) -> str:
    """The smallest removals: for each side, the requested feature at the root of its chain."""
    roots = dict.fromkeys(state.root(name) for name in names)
    return " or ".join(f"remove {root}" for root in roots)


def check_sizes(state: ResolutionState) -> None:
    world = state.world
    product = world.tp * world.pp * world.cp
    if world.knows("world_size") and world.world_size % product:
        factors = f"tp x pp x cp = {world.tp} x {world.pp} x {world.cp} = {product}"
        text = f"world size {world.world_size} is not a multiple of {factors}"
        option = "--nproc" if state.merged.world["world_size"].source == LAUNCH else "--world-size"
        fix = f"{option} {-(-world.world_size // product) * product}, or smaller parallel sizes"
        state.problems.append(Problem("MS302", text, fix=fix))


def note_idle_owners(state: ResolutionState) -> None:
    """A row for every active feature whose parallel size is 1: it is there and changes nothing."""
    for name in sorted(state.active):
        for size in state.specs[name].sizes:
            if state.world.knows(size) and getattr(state.world, size) == 1:
                state.rows.append(PlanNote("note", name, f"the {size_name(size)} is 1, so {name} changes nothing"))


def check_platforms(state: ResolutionState) -> None:
    platform = str(state.world.platform)
    for name in state.active:
        spec = state.specs[name]
        if spec.platforms and platform not in spec.platforms:
            text = f"{name} does not run on {platform}, only on {', '.join(sorted(spec.platforms))}"
            state.problem("MS208", text, (name,), f"remove {state.root(name)}")
        if spec.megatron and state.world.knows("megatron") and not version_in(state.world.megatron, spec.megatron):
            text = f"{name} needs megatron-core {spec.megatron}, this is {state.world.megatron}"
            state.problem("MS208", text, (name,), f"install a megatron-core {spec.megatron}, or remove {state.root(name)}")


def check_operators(state: ResolutionState) -> None:
    """A row for every active feature with an operator that runs its plain-torch reference; under strict a problem."""
    platform = str(state.world.platform)
    for name in sorted(state.active):
        missing = [op for op in state.specs[name].ops if not state.has_variant(op, platform)]
        if not missing:
            continue
        text = f"only the reference of {', '.join(missing)} runs on {platform}"
        if state.merged.strict:
            fix = "mindspeed ops list says why; mindspeed ops build builds those in C++"
            state.problem("MS515", f"{name}: {text}", (name,), fix)
        else:
            state.rows.append(PlanNote("note", name, f"{text}, which is slower; mindspeed ops list says why"))


def add_notes(state: ResolutionState) -> None:
    """A row for every sentence that an active feature says about its settings; none where a value is not known."""
    for name in sorted(state.active):
        notes, args = state.specs[name].notes, state.args_of(name)
        if notes is None or args is None:
            continue
        with suppress(UnknownValue):
            state.rows.extend([PlanNote("note", name, text) for text in notes(args, state.world)])


def run_checks(state: ResolutionState) -> None:
    for name, check in state.constraints(Check):
        args = state.args_of(name)
        other = state.args_of(check.of) if check.of in state.active else None
        if args is None or (check.of and other is None):
            continue
        try:
            found = failed(check, args, state.world, other)
        except UnknownValue as unknown:
            state.not_checked(name, unknown, check.format(check.message, args, Loose(state.world), other))
            continue
        except Exception as error:  # a plugin's predicate may fail in any way; the message must name the plugin
            state.failed_itself("a check", name, error)
            continue
        if found and check.warns:
            state.rows.append(PlanNote("warning", name, f"{name}: {found[0]}"))
        elif found:
            names = (name, check.of) if check.of else (name,)
            state.problem("MS304", f"{name}: {found[0]}", names, found[1])


def failed(check: Check, args: FeatureArgs, world: World, other: FeatureArgs | None = None) -> tuple[str, str] | None:
    """Message and fix of a check that does not hold; raises whatever it raises, `UnknownValue` too."""
    if check.test(args, world, *((other,) if check.of else ())):
        return None
    return check.format(check.message, args, world, other), check.format(check.fix, args, world, other)


class Loose:
    """A world for messages only: an unknown value reads as a question mark."""

    def __init__(self, world: World) -> None:
        self._world = world

    def __getattr__(self, name: str) -> object:
        return getattr(self._world, name) if self._world.knows(name) else "?"


def _listing(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"
