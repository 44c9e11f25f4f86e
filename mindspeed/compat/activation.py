"""Planning and activating requests under old names, in addition to the active plan."""

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
from mindspeed.compat import arguments, manager
from mindspeed.compat.adapter import PREFIX, OldArgs, OldFeature, name_of, own_arguments, refusal_of, registrations_of
from mindspeed.compat.feature import OwnFeature, known_names
from mindspeed.compat.megatron_lm import MegatronArguments, wires_arguments
from mindspeed.compat.old_flags import flags
from mindspeed.compat.patches import DIRECT, MindSpeedPatchesManager
from mindspeed.compat.registrations import Registration, force_overridden, patches_of, require_patches
from mindspeed.engine.planning.plan import ActivationPlan
from mindspeed.engine.resolution.planned_feature import PlanNote, ReasonKind
from mindspeed.engine.resolution.request import Layer
from mindspeed.engine.runtime import session
from mindspeed.engine.runtime.rendezvous import place_in
from mindspeed.job.world import FIELDS, World
from mindspeed.megatron_lm.argument_layers import declared_flags
from mindspeed.plugins import Category, Feature, FeatureArgs, FeatureSpec, Patch, Stability, hookimpl
from mindspeed.plugins.answers import answer
from mindspeed.plugins.discovery import BUILT_IN, DiscoveredFeature
from mindspeed.problems import Fix, MindSpeedError, Problem, ResolutionError

SOURCE: Final = "old names"
"""Source of values in a plan that came in through the old Python names."""

_REQUESTED: Final = (ReasonKind.REQUESTED, ReasonKind.ARGUMENT)
"""The words of a plan for a feature that stands in the request itself."""

_SHOWN: Final = 8
"""Arguments that nobody reads are named up to this many."""

_ALGORITHM: Final = "context_parallel_algo"

_lock = threading.RLock()


class DirectPatches(Feature[FeatureArgs]):
    """Apply patches that MindSpeedPatchesManager registered outside of any feature."""

    spec = FeatureSpec(
        name=DIRECT,
        category=Category.SCENARIO,
        level=0,
        stability=Stability.EXPERIMENTAL,
    )

    @hookimpl
    def patches(self) -> list[Patch]:
        return require_patches([call for call in _direct() if call not in _state.force_overridden])


@dataclasses.dataclass(slots=True)
class _State:
    """Hold the requests of the old names so far in this process.

    ``base`` is the plan that others had activated, ``digest`` that of the plan made here, ``args`` the arguments,
    ``force_overridden`` the replacements that give way to forced ones, ``removed`` the features whose old flag `repatch` set
    to a false value, ``strange`` a note on arguments that nobody knows, ``said`` what was already printed.
    """

    base: ActivationPlan | None = None
    digest: str = ""
    args: Namespace | None = None
    force_overridden: frozenset[Registration] = frozenset()
    removed: frozenset[str] = frozenset()
    strange: str = ""
    said: set[str] = dataclasses.field(default_factory=set)


_state = _State()


@dataclasses.dataclass(slots=True)
class _Request:
    """Hold the request of some arguments: our features through old flags, old features, notes and problems."""

    layer: Layer
    rows: list[PlanNote]
    problems: list[Problem]


def repatch(args: Mapping[str, Any] | Namespace) -> None:
    """Accept arguments by Megatron's or MindSpeed's names, and make, check and activate their plan.

    What was active stays unless the arguments change it. Raises MindSpeedError with every problem; the plan that was
    active before is then still active, and the arguments are forgotten.
    """
    with _lock:
        known = arguments.get_full_args()
        given, state = dict(vars(known)), dataclasses.replace(_state)
        try:
            _take(args if isinstance(args, Mapping) else vars(args), known)
            place = place_in(os.environ)
            # where the ranks of a job compare plans at activation all must activate, also those that change nothing
            replan(known, again=place is not None and place.kept)
        except BaseException:
            vars(known).clear()
            vars(known).update(given)
            for field in dataclasses.fields(_State):
                setattr(_state, field.name, getattr(state, field.name))
            raise


def _take(values: Mapping[str, Any], known: Namespace) -> None:
    """Add new arguments to the known ones, and note the features that an old flag with a false value removes."""
    has = known_names() | vars(known).keys()
    _state.strange = _unread([name for name in values if name not in has])
    for name, value in values.items():
        setattr(known, name, value)
        old = flags.BY_DEST.get(name)
        if old is not None and old.switch:
            change = _state.removed.difference if value else _state.removed.union
            _state.removed = change(old.features)


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
        if again or before is None or not before.is_same(plan):
            _exchange(before, plan)
        _state.digest = plan.digest
        _say(rows)


def _unread(names: Sequence[str]) -> str:
    """Say in one line which arguments nobody reads."""
    if len(names) < 2:
        return "".join(f"no feature reads {name}, and Megatron has no such argument" for name in names)
    shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    return f"no feature reads {len(names)} of the arguments, and Megatron has none of them: {shown}"


def _chosen_algorithm(values: Mapping[str, Any]) -> tuple[dict[str, str], str]:
    """MindSpeed's argument for the algorithm of context parallelism where it is not given, and why it is that.

    Megatron's own choice counts, else MindSpeed's default. Nothing where the size is 1, or where a feature of the plan that
    others made is the algorithm.
    """
    size, algorithms = values.get("context_parallel_size"), flags.BY_DEST[_ALGORITHM].choices
    if values.get(_ALGORITHM) or not isinstance(size, int) or size < 2:
        return {}, ""
    if _state.base is not None and not set(algorithms.values()).isdisjoint(_state.base.names):
        return {}, ""
    kind = values.get("cp_comm_type")
    kind = kind[0] if isinstance(kind, list) and kind else kind
    kinds = ((flag.values, name) for name, flag in declared_flags(registry.catalog_for(())) if flag.dest == "cp_comm_type")
    feature = next((name for accepted, name in kinds if kind in accepted), "")
    if feature:
        name = next(name for name, known in algorithms.items() if known == feature)
        return {_ALGORITHM: name}, f"cp_comm_type {kind} maps to {feature}"
    name, feature = next(iter(algorithms.items()))
    return {_ALGORITHM: name}, f"{_ALGORITHM} is not given: {name}, MindSpeed's default, maps to {feature}"


def withdraw() -> None:
    """Undo what the old names brought; the plan of others is active again."""
    with _lock:
        active = session.current()
        if active is not None and active.plan.digest == _state.digest:
            _exchange(active.plan, _state.base)
            _state.digest = ""


def refresh() -> None:
    """Plan again if a plan of mindspeed is active."""
    active = session.current()
    if active is not None and active.plan.digest == _state.digest:
        replan()


def _exchange(before: ActivationPlan | None, plan: ActivationPlan | None) -> None:
    """Deactivate one plan and activate another; the first is active again when the second fails."""
    if before is not None:
        registry.deactivate()
    for info in MindSpeedPatchesManager.patches_info.values():
        info.suspension = None
    try:
        if plan is not None:
            registry.activate(plan)
    except MindSpeedError:
        if before is not None:
            registry.activate(before)
        raise


def _plan() -> tuple[ActivationPlan, list[PlanNote]]:
    """Plan what the old names request so far, and return the rows that they add."""
    common = _state.args
    registry.provide(manager.found_rows(common))
    request = _request(vars(common)) if common is not None else _Request(Layer(SOURCE), [], [])
    rows = request.rows
    calls = [*_calls_of(request), *_direct()]
    kept, given_way = force_overridden(calls)
    _state.force_overridden = frozenset(calls) - frozenset(kept)
    rows += given_way
    for owner in dict.fromkeys(call.owner for call in kept):
        _, notes, wrong = patches_of([call for call in kept if call.owner == owner])
        rows += notes
        request.problems += wrong
    ours = [*([DirectPatches] if _direct() else []), *([MegatronArguments] if wires_arguments() else [])]
    named = [(kind.spec.name, f"{kind.__module__}:{kind.__qualname__}", kind) for kind in ours]
    own_rows = [DiscoveredFeature(name, BUILT_IN, __version__, reference, kind) for name, reference, kind in named]
    registry.provide([*manager.found_rows(common, _state.force_overridden), *own_rows])
    layers = [request.layer, Layer(SOURCE, tuple(kind.spec.name for kind in ours))]
    if _state.base is not None:
        layers.insert(0, _layer_of(_state.base, request.layer))
    try:
        plan = registry.resolve(layers)
    except MindSpeedError as error:
        raise type(error)(dict.fromkeys([*request.problems, *error.problems])) from None
    if request.problems:
        raise ResolutionError(request.problems)
    return dataclasses.replace(plan, rows=(*plan.rows, *rows)), rows


def _request(values: Mapping[str, Any]) -> _Request:
    listed = manager.MindSpeedFeaturesManager.FEATURES_LIST
    own = {name for feature in listed if isinstance(feature, OwnFeature) for name in feature.names}
    by_flag = {dest: value for dest, value in values.items() if dest in flags.BY_DEST and not arguments.is_of_plan(dest, value)}
    algorithm, why = _chosen_algorithm(values)
    by_flag |= algorithm
    taken = {action.dest for feature in manager.old_features() for action in own_arguments(feature)}
    unused = []
    for old in flags.OLD_FLAGS:
        if own.isdisjoint(old.features) and by_flag.pop(old.dest, None) and old.dest not in taken:
            unused.append(f"{old.flag} has no effect: {' or '.join(old.features)} is not in the list of features")
    layer, by_dest, problems = flags.request_of({**values, **dict.fromkeys(flags.BY_DEST), **by_flag}, registry.catalog())
    notes = [*(note for dest, note in by_dest.items() if not (why and dest == _ALGORITHM)), why]
    features, settings = list(layer.features), {name: dict(fields) for name, fields in layer.settings.items()}
    rows = [PlanNote("note", "compat", note) for note in (*notes, *unused, _state.strange) if note]
    for name, fields in arguments.megatron_features(values).items():
        if name in registry.catalog().usable:
            features.append(name)
            settings[name] = fields | settings.get(name, {})
    world = arguments.world_of(values)
    complete = arguments.namespace_of(World(world), values)
    broken = registry.catalog().broken
    for feature in manager.old_features():
        name, own_settings = name_of(feature), manager.given_arguments(feature, values)
        if name in broken and (problem := broken[name].problem) is not None:
            rows.append(PlanNote("note", name, problem.message))
        try:
            needed = feature.is_need_apply(complete)
        except Exception as error:  # foreign code may fail in any way
            text = f"{name} raised an error in is_need_apply: {refusal_of(error)}"
            fix = Fix.advise("correct is_need_apply")
            problems.append(Problem("MS901", text, (name,), where=manager.where_of(feature), fix=fix))
            continue
        if needed:
            features.append(name)
            settings[name] = own_settings
        elif reason := manager.never_on(feature):
            if own_settings:
                options = [action.option_strings[0] for action in own_arguments(feature) if action.dest in own_settings]
                text = f"{', '.join(options)} is given to {name}, but {reason}"
                fix = Fix.advise(f"request it by name (--features {name}), or let it register --{name.removeprefix(PREFIX)}")
                problems.append(Problem("MS110", text, (name,), where=manager.where_of(feature), fix=fix))
            rows.append(PlanNote("note", name, reason))
    level = values.get("optimization_level", 2)
    layer = Layer(SOURCE, tuple(features), settings, world, level=level if level in (0, 1) else None)
    return _Request(layer, rows, problems)


def _calls_of(request: _Request) -> list[Registration]:
    """Collect the registrations of old features in the order of the list; a failure is a problem of the request."""
    calls: list[Registration] = []
    layer, known, world = request.layer, registry.catalog(), World(dict(request.layer.world))
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
            request.problems += error.problems
    return calls


def _direct() -> list[Registration]:
    return [call for call in MindSpeedPatchesManager.registrations if call.owner == DIRECT]


def _layer_of(plan: ActivationPlan, above: Layer) -> Layer:
    """A plan as a request below ``above``: what it set, without the sizes that are asked for anew."""
    owners = {owner: size for size, (owner, _) in registry.catalog().owners.items()}
    gone = _state.removed | {name for name, size in owners.items() if size in above.world}
    requested = {feature.name for feature in plan.features if feature.why[0].kind in _REQUESTED}  # the rest follows again
    features = tuple(feature.name for feature in plan.features if feature.name in requested - gone)
    settings = {
        feature.name: {key: value.value for key, value in feature.settings.items() if value.source != "default"}
        for feature in (*plan.base, *plan.features)
        if feature.name not in _state.removed
    }
    left_out = {"platform", "megatron", *arguments.assumed_world(plan.world), *_facts_of_features(plan)}
    world = {name: value for name, value in plan.world.known().items() if name not in left_out}
    return Layer("active plan", features, settings, world, level=plan.level, strict=plan.strict, platform=plan.world.platform)


def _facts_of_features(plan: ActivationPlan) -> set[str]:
    """The fields of the job that features of a plan gave and no option can: these follow again from the next plan."""
    given = set[str]()
    for planned in plan.features:
        feature = registry.catalog_for([planned.name]).feature(planned.name)
        given.update(answer(feature, "job_values", feature.Args(**planned.args), plan.world) or ())
    return {name for name in given if not FIELDS[name].arguments}


def _say(rows: Sequence[PlanNote]) -> None:
    """Print rows that were not printed before, on rank 0."""
    if os.environ.get("RANK", "0") != "0":
        return
    for text in dict.fromkeys(f"mindspeed: {row.feature}: {row.text}" for row in rows):
        if text not in _state.said:
            _state.said.add(text)
            print(text, file=sys.stderr)
