"""Planning and activating what came in under old names, beside what is active already."""

from __future__ import annotations

import dataclasses
import os
import sys
import threading
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from pydantic import ValidationError

from mindspeed import registry
from mindspeed._version import __version__
from mindspeed.legacy import arguments, flags, manager
from mindspeed.legacy.adapter import PREFIX, OldArgs, OldFeature, name_of, own_arguments, refusal_of, registrations_of
from mindspeed.legacy.feature import OwnFeature
from mindspeed.legacy.known_names import known_names
from mindspeed.legacy.megatron_lm import MegatronArguments, wires_arguments
from mindspeed.legacy.patches import DIRECT, MindSpeedPatchesManager
from mindspeed.legacy.registrations import Registration, force_overridden, patches_of
from mindspeed.planning.plan import ActivationPlan
from mindspeed.plugins.discovery import BUILT_IN, DiscoveredFeature
from mindspeed.plugins.feature import Category, Feature, FeatureArgs, FeatureSpec, Stability
from mindspeed.plugins.hookspecs import hookimpl
from mindspeed.plugins.patches import Patch
from mindspeed.plugins.problems import MindSpeedError, Problem, ResolutionError
from mindspeed.plugins.world import World
from mindspeed.resolution.planned_feature import PlanNote
from mindspeed.resolution.request import Layer
from mindspeed.runtime import session
from mindspeed.runtime.rendezvous import place_in

SOURCE: Final = "old names"
"""Source of values in a plan that came in through the old Python names."""

_ASKED: Final = (": you asked for it", " asks for it")
"""The words of a plan for a feature that stands in the request itself."""

_lock = threading.RLock()


class DirectPatches(Feature[FeatureArgs]):
    """Patches that were registered outside of any feature."""

    spec = FeatureSpec(
        name=DIRECT,
        summary="Patches registered through MindSpeedPatchesManager outside of any feature",
        category=Category.SCENARIO,
        level=0,
        stability=Stability.EXPERIMENTAL,
    )

    @hookimpl
    def patches(self) -> list[Patch]:
        patches, _, problems = patches_of([one for one in _direct() if one not in _state.force_overridden])
        if problems:
            raise MindSpeedError(problems)
        return patches


@dataclasses.dataclass(slots=True)
class _State:
    """Hold the requests of the old names so far in this process.

    ``base`` is the plan that others had activated, ``digest`` that of the plan made here, ``args`` the arguments,
    ``force_overridden`` the replacements that give way to forced ones, ``taken_out`` the features whose old flag `repatch` set
    to a false value, ``strange`` notes on arguments that nobody knows, ``said`` what was already printed.
    """

    base: ActivationPlan | None = None
    digest: str = ""
    args: Namespace | None = None
    force_overridden: frozenset[Registration] = frozenset()
    taken_out: frozenset[str] = frozenset()
    strange: tuple[str, ...] = ()
    said: set[str] = dataclasses.field(default_factory=set)


_state = _State()


@dataclasses.dataclass(slots=True)
class _Asked:
    """Hold the request in some arguments: our features through old flags, old features, notes and problems."""

    layer: Layer
    rows: list[PlanNote]
    problems: list[Problem]


def repatch(args: Mapping[str, Any] | Namespace) -> None:
    """Take new arguments, by Megatron's or MindSpeed's names, and make, check and activate the plan they ask for.

    What was active stays unless the arguments change it. Raises MindSpeedError with every problem; the plan that was
    active before is then still active.
    """
    known = arguments.get_full_args()
    given = args if isinstance(args, Mapping) else vars(args)
    has = known_names() | vars(known).keys()
    _state.strange = tuple(f"no feature reads {name}, and Megatron has no such argument" for name in given if name not in has)
    for name, value in given.items():
        setattr(known, name, value)
        old = flags.BY_DEST.get(name)
        if old is not None and old.switch:
            change = _state.taken_out.difference if value else _state.taken_out.union
            _state.taken_out = change(old.features)
    replan(known, again=_agrees_at_activation())


def replan(args: Namespace | None = None, again: bool = False) -> None:
    """Activate the plan of the features that ``args`` switches on, of registered patches, and of what others activated.

    When that plan is active already nothing happens, or it is activated ``again``. Says new spellings and what must be
    known once, on stderr.
    """
    with _lock:
        active = session.current()
        before = active.plan if active is not None else None
        if before is None or before.digest != _state.digest:
            _state.base = before
        _state.args = args if args is not None else _state.args
        plan, rows = _plan()
        if again or before is None or before.digest != plan.digest:
            _exchange(before, plan)
        _state.digest = plan.digest
        _say(rows)


def _agrees_at_activation() -> bool:
    """Return whether the ranks of this job compare plans when they activate: then all must, also those that change nothing."""
    place = place_in(os.environ)
    return place is not None and place.kept and place.size > 1


def withdraw() -> None:
    """Undo what the old names brought; the plan of others is active again."""
    with _lock:
        active = session.current()
        if active is not None and active.plan.digest == _state.digest:
            _exchange(active.plan, _state.base)
            _state.digest = ""


def refresh() -> None:
    """Plan again if a plan of ours is active."""
    active = session.current()
    if active is not None and active.plan.digest == _state.digest:
        replan()


def _exchange(before: ActivationPlan | None, plan: ActivationPlan | None) -> None:
    """Deactivate one plan and activate another; the first is active again when the second fails."""
    if before is not None:
        registry.deactivate()
    for info in MindSpeedPatchesManager.patches_info.values():
        info.forget_suspension()
    try:
        if plan is not None:
            registry.activate(plan)
    except MindSpeedError:
        if before is not None:
            registry.activate(before)
        raise


def _plan() -> tuple[ActivationPlan, list[PlanNote]]:
    """The plan of everything that is asked for now, and the rows that the old names add to it."""
    common = _state.args
    registry.provide(manager.found_rows(common))
    asked = _asked(vars(common)) if common is not None else _Asked(Layer(SOURCE), [], [])
    rows = asked.rows
    calls = [*_calls_of(asked), *_direct()]
    kept, given_way = force_overridden(calls)
    _state.force_overridden = frozenset(calls) - frozenset(kept)
    rows += given_way
    for owner in dict.fromkeys(one.owner for one in kept):
        _, noted, wrong = patches_of([one for one in kept if one.owner == owner])
        rows += noted
        asked.problems += wrong
    layers = [asked.layer]
    provided = manager.found_rows(common, _state.force_overridden)
    ours = [kind for kind, wanted in ((DirectPatches, _direct()), (MegatronArguments, wires_arguments())) if wanted]
    for kind in ours:
        reference = f"{kind.__module__}:{kind.__qualname__}"
        provided.append(DiscoveredFeature(kind.spec.name, BUILT_IN, __version__, reference, kind))
    layers.append(Layer(SOURCE, tuple(kind.spec.name for kind in ours)))
    registry.provide(provided)
    if _state.base is not None:
        layers.insert(0, _layer_of(_state.base, asked.layer))
    try:
        plan = registry.resolve(layers)
    except ResolutionError as error:
        raise ResolutionError(dict.fromkeys([*asked.problems, *error.problems])) from None
    except MindSpeedError as error:
        raise type(error)(dict.fromkeys([*asked.problems, *error.problems])) from None
    if asked.problems:
        raise ResolutionError(asked.problems)
    return dataclasses.replace(plan, rows=(*plan.rows, *rows)), rows


def _asked(given: Mapping[str, Any]) -> _Asked:
    listed = manager.MindSpeedFeaturesManager.FEATURES_LIST
    own = {feature.name for feature in listed if isinstance(feature, OwnFeature)}
    heard = {dest: value for dest, value in given.items() if dest in flags.BY_DEST}
    taken = {action.dest for feature in manager.old_features() for action in own_arguments(feature)}
    unheard = []
    for old in flags.OLD_FLAGS:
        if own.isdisjoint(old.features) and heard.pop(old.dest, None) and old.dest not in taken:
            unheard.append(f"{old.flag} does nothing: {' or '.join(old.features)} is not in the list of features")
    layer, notes, problems = flags.request_of({**given, **dict.fromkeys(flags.BY_DEST), **heard}, registry.catalog())
    features, settings = list(layer.features), {name: dict(fields) for name, fields in layer.settings.items()}
    rows = [PlanNote("note", "compat", note) for note in (*notes, *unheard, *_state.strange)]
    for name, fields in arguments.megatron_features(given).items():
        if name in registry.catalog().usable:
            features.append(name)
            settings[name] = fields | settings.get(name, {})
    world = arguments.world_of(given)
    complete = arguments.namespace_of(World(world), given)
    broken = registry.catalog().broken
    for feature in manager.old_features():
        name, own_settings = name_of(feature), manager.given_arguments(feature, given)
        if name in broken and (problem := broken[name].problem) is not None:
            rows.append(PlanNote("note", name, problem.message))
        try:
            needed = feature.is_need_apply(complete)
        except Exception as error:  # foreign code may fail in any way
            text = f"{name} failed when it was asked whether it is on: {refusal_of(error)}"
            problems.append(Problem("MS901", text, (name,), where=manager.where_of(feature)))
            continue
        if needed:
            features.append(name)
            settings[name] = own_settings
        elif reason := manager.never_on(feature):
            if own_settings:
                text = f"{', '.join(manager.options_of(feature, own_settings))} is given to {name}, and {reason}"
                fix = f"ask for it by name (--features {name}), or let it register --{name.removeprefix(PREFIX)}"
                problems.append(Problem("MS110", text, (name,), where=manager.where_of(feature), fix=fix))
            rows.append(PlanNote("note", name, reason))
    level = given.get("optimization_level", 2)
    layer = Layer(SOURCE, tuple(features), settings, world, level=level if level in (0, 1) else None)
    return _Asked(layer, rows, problems)


def _calls_of(asked: _Asked) -> list[Registration]:
    """Collect the registrations of old features in the order of the list; a failure is a problem of the request."""
    calls: list[Registration] = []
    layer, known = asked.layer, registry.catalog()
    world = World(dict(layer.world))
    for feature in manager.old_features():
        name = name_of(feature)
        if name not in layer.features or name not in known.usable:
            continue
        adapter = cast("type[OldFeature]", known.feature(name))
        try:
            calls += registrations_of(adapter(cast("OldArgs", adapter.Args(**layer.settings[name])), world))
        except ValidationError:
            continue  # the resolver says what is wrong with a setting
        except MindSpeedError as error:
            asked.problems += error.problems
    return calls


def _direct() -> list[Registration]:
    return [one for one in MindSpeedPatchesManager.registrations if one.owner == DIRECT]


def _layer_of(plan: ActivationPlan, above: Layer) -> Layer:
    """A plan as a request below ``above``: what it set, without the sizes that are asked for anew."""
    owners = {owner: size for size, (owner, _) in registry.catalog().owners.items()}
    gone = _state.taken_out | {name for name, size in owners.items() if size in above.world}
    asked_for = {one.name for one in plan.features if one.why[0].endswith(_ASKED)}  # the rest follows again
    features = tuple(one.name for one in plan.features if one.name in asked_for - gone)
    settings = {
        one.name: {key: value.value for key, value in one.settings.items() if value.source != "default"}
        for one in (*plan.base, *plan.features)
        if one.name not in _state.taken_out
    }
    world = {name: value for name, value in plan.world.known().items() if name not in ("platform", "megatron")}
    return Layer("active plan", features, settings, world, level=plan.level, strict=plan.strict, platform=plan.world.platform)


def _say(rows: Sequence[PlanNote]) -> None:
    """Print rows that were not printed before, on rank 0."""
    if os.environ.get("RANK", "0") != "0":
        return
    for text in dict.fromkeys(f"mindspeed: {row.feature}: {row.text}" for row in rows):
        if text not in _state.said:
            _state.said.add(text)
            print(text, file=sys.stderr)
