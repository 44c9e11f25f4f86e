"""The front door: discover features, resolve a request into a plan, activate it.

>>> plan = mindspeed.plan(features=["tensor-parallel"], settings={"tensor-parallel": {"size": 2}})
>>> report = mindspeed.activate(plan)
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mindspeed.engine.planning import build_plan, fingerprint
from mindspeed.engine.planning.build_plan import Framework
from mindspeed.engine.planning.kill_switch import disabled_layer, refuse_disabled
from mindspeed.engine.planning.patch_checks import check_contracts
from mindspeed.engine.planning.plan import ActivationPlan, plan_from_json
from mindspeed.engine.resolution.environment import Environment, engine_installed, installed_version
from mindspeed.engine.resolution.planned_feature import PlanNote
from mindspeed.engine.resolution.request import Layer, layer_from_call, layer_from_environment
from mindspeed.engine.resolution.resolution_state import HasVariant, Measurements, Suggestions, nothing_measured
from mindspeed.engine.resolution.resolver import resolve as resolve_names
from mindspeed.engine.runtime import rendezvous, session, uncaught
from mindspeed.engine.runtime.effects import EffectReport
from mindspeed.engine.runtime.session import ActivationReport, DeactivationReport, Surroundings, suspended
from mindspeed.files.cache_folder import CACHE_VARIABLE
from mindspeed.files.text_files import replace_text
from mindspeed.job.world import PLATFORMS, UnknownValue
from mindspeed.memory_planner.budgets import within_budgets
from mindspeed.ops.variants import public_functions
from mindspeed.plugins.answers import answer
from mindspeed.plugins.constraints import AUTO
from mindspeed.plugins.discovery import Catalog, DiscoveredFeature, discover, features_beside_platforms
from mindspeed.plugins.found import PLUGINS_VARIABLE, unmatched
from mindspeed.problems import Fix, MindSpeedError, PatchError, Problem, ResolutionError, in_python
from mindspeed.process.tracing import trace, tracing
from mindspeed.process.variables import Variables, unset_variables, variable_problems
from mindspeed.process.watchdog import watched

if TYPE_CHECKING:
    from mindspeed.engine.planning.targets import PatchTarget
    from mindspeed.engine.resolution.applied_fixes import JobRequest
    from mindspeed.plugins import Feature, Patch

__all__ = ["activate", "activate_from_environment", "catalog", "deactivate", "defaults", "plan", "resolve", "step", "suspended"]

PLAN_VARIABLE: Final = "MINDSPEED_PLAN"
"""Environment variable that names the plan file of a child process."""

_provided: tuple[DiscoveredFeature, ...] = ()


@lru_cache(maxsize=16)
def catalog(only: frozenset[str] | None = None) -> Catalog:
    """Every installed feature, discovered once per process; ``catalog.cache_clear()`` looks again.

    With ``only``, features of other distributions are loaded only when they are named there, or required by one that is.
    """
    found = discover(only=only)
    names = {row.name for row in _provided}
    return Catalog([*(row for row in found.rows if row.name not in names), *_provided]) if _provided else found


def provide(rows: Iterable[DiscoveredFeature]) -> None:
    """Add features that this process made itself to the catalog, in place of those it added before."""
    global _provided
    _provided = tuple(rows)
    catalog.cache_clear()


def catalog_for(names: Iterable[str]) -> Catalog:
    """A catalog in which of other distributions nothing is loaded but these features and what they require."""
    light = catalog(frozenset())
    third_parties = frozenset(name for name in names if name in light.not_loaded)
    return catalog(third_parties) if third_parties else light


def defaults() -> dict[str, dict[str, Any]]:
    """The default of every setting that has one, ``{feature: {setting: value}}``; without torch and megatron."""
    found: dict[str, dict[str, Any]] = {}
    for name, model in catalog().models.items():
        optional = {key: field for key, field in model.model_fields.items() if not field.is_required()}
        found[name] = {key: field.get_default(call_default_factory=True) for key, field in optional.items()}
    return found


@watched()
def resolve(
    layers: Sequence[Layer],
    environment: Environment | None = None,
    known: Catalog | None = None,
    untried: Suggestions | None = None,
) -> ActivationPlan:
    """Turn request layers (low to high) into a plan. Raises ResolutionError with every problem.

    Without ``known``, of other distributions only the named features are loaded, and what those require. With ``untried`` the
    problems have these fixes, none of which is tried: for whoever has other requests to make first.
    """
    known = known or catalog_for(_named([*layers, disabled_layer()]))
    platform = next((layer.platform for layer in reversed(layers) if layer.platform), None)
    environment = environment or probe(platform)
    if platform is not None and platform != environment.platform:
        environment = replace(environment, platform=platform)

    def problems_of(request: JobRequest, suggestions: Suggestions) -> tuple[Problem, ...]:
        return judge(request, suggestions, known)[1]

    try:
        return _resolve(layers, environment, known, untried or "declared")
    except ResolutionError as error:
        if untried is not None:
            raise
        from mindspeed.engine.resolution.applied_fixes import JobRequest
        from mindspeed.engine.resolution.mending import one_of_each, with_tried_fixes

        request = JobRequest(tuple(layers), environment)
        error.problems = tuple(one_of_each(with_tried_fixes(error.problems, request, problems_of)))
        raise


def judge(
    request: JobRequest, suggestions: Suggestions = "declared", known: Catalog | None = None
) -> tuple[ActivationPlan | None, tuple[Problem, ...]]:
    """Return the plan of a request, or its problems with these fixes, untried."""
    known = known or catalog_for(_named([*request.layers, disabled_layer()]))
    try:
        return _resolve(request.layers, request.environment, known, suggestions), ()
    except ResolutionError as error:
        return None, error.problems


def _resolve(
    layers: Sequence[Layer], environment: Environment, known: Catalog, suggestions: Suggestions = "declared"
) -> ActivationPlan:
    from mindspeed.job.megatron_arguments import OF_TRAINING
    from mindspeed.megatron.argument_overrides import check_overrides
    from mindspeed.ops.variants import has_variant

    layers = [*layers, disabled_layer()]
    runs: HasVariant | None = None
    measurements: Measurements = nothing_measured
    if environment.source == "probed":
        from mindspeed.ops.availability import build_obstacle, measured, running

        runs, measurements = running(environment.platform), measured(environment.platform)
        if obstacle := build_obstacle(environment.platform):
            text = f"the C++ operators are not built, so operators use their plain-torch references; {obstacle}"
            layers.append(Layer("cache", notes=(PlanNote("warning", CACHE_VARIABLE, text),)))
    if absent := unmatched(known.rows):
        text = f"{', '.join(absent)}: no distribution with features has that name"
        layers.append(Layer("plugins", notes=(PlanNote("warning", PLUGINS_VARIABLE, text),)))
    framework = Framework(base_features(environment.platform), _hook_patches, check_overrides, frozenset(OF_TRAINING))
    resolution = resolve_names(layers, known, environment, framework.base, has_variant, runs, suggestions, measurements)
    if resolution.problems:
        raise ResolutionError(resolution.problems)
    try:
        made = within_budgets(build_plan.build_plan(resolution, known, environment, framework), known)
    except UnknownValue as unknown:
        text = f"{unknown.field} is not set, but a feature of the plan needs it"
        raise ResolutionError([Problem("MS302", text, fix=Fix.give_field(unknown.field))]) from None
    if tracing():  # the digest of a large plan takes a while
        trace("resolved", f"{', '.join(made.names) or 'no features'}; plan {made.digest}")
    return made


def probe(platform: str | None = None, environ: Mapping[str, str] = os.environ) -> Environment:
    """The environment of this process, read from metadata and source files; neither torch nor megatron is imported."""
    from mindspeed.engine.inspection.megatron_copies import megatron_version
    from mindspeed.platforms import detect

    size = environ.get("WORLD_SIZE", "")
    return Environment(
        platform=platform or detect(),
        megatron=megatron_version(),
        torch=installed_version("torch"),
        world_size=int(size) if size.isdigit() else None,
        source="probed",
        engine=engine_installed(),
    )


def base_features(platform: str) -> tuple[type[Feature[Any]], ...]:
    """Level-0 features of a platform: itself, related features, Megatron fixes, hook points, agreement of ranks.

    Raises PlatformError for an unknown platform.
    """
    from mindspeed.megatron.fixes.feature import MegatronFixes
    from mindspeed.megatron.hook_points import MegatronHookPoints
    from mindspeed.platforms import device_layer
    from mindspeed.platforms.plan_agreement import PlanAgreement

    beside = features_beside_platforms()
    features: tuple[type[Feature[Any]], ...] = (
        device_layer(platform),
        *beside,
        MegatronFixes,
        MegatronHookPoints,
        PlanAgreement,
    )
    return tuple(feature for feature in features if not feature.spec.platforms or platform in feature.spec.platforms)


def _hook_patches(
    hooks: Collection[str], arguments: Collection[str], environment: Environment, proven: bool, asked: frozenset[str]
) -> list[tuple[str, Patch]]:
    from mindspeed.megatron.hook_points import MegatronHookPoints, hook_points_for

    patches = hook_points_for(hooks, arguments, environment.training, environment.megatron, proven, environment.platform, asked)
    return [(MegatronHookPoints.spec.name, patch) for patch in patches]


def megatron_targets(known: Catalog) -> list[PatchTarget]:
    """Every place in Megatron that the framework or a feature of a catalog may patch."""
    from mindspeed.engine.planning.targets import megatron_targets
    from mindspeed.megatron.hook_points import MegatronHookPoints, all_hook_patches

    base = [feature for platform in PLATFORMS for feature in base_features(platform)]
    return megatron_targets(known, base, [(MegatronHookPoints.spec.name, patch) for patch in all_hook_patches()])


def content_of(plan: ActivationPlan, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The facts of a plan in this process, see `mindspeed.engine.planning.fingerprint.content_of`."""
    from mindspeed.ops.availability import kinds

    return fingerprint.content_of(plan, catalog_for(plan.names), kinds, environ)


def _with_facts(plan: ActivationPlan, facts: Mapping[str, str]) -> dict[str, str]:
    return content_of(plan) | dict(facts)


def feature_classes(plan: ActivationPlan) -> dict[str, type[Feature[Any]]]:
    """The class of every feature of a plan that is installed here, by name."""
    known = catalog_for(plan.names)
    return {name: known.feature(name) for name in plan.names if name in known.usable}


def process_variables(plan: ActivationPlan, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that a launcher gives the processes of a plan, in addition to those of the launcher."""
    return unset_variables(_variables_of(plan, feature_classes(plan)).values(), environ)


def _variables_of(plan: ActivationPlan, classes: Mapping[str, type[Feature[Any]]]) -> dict[str, Variables]:
    """Return the variables that features of a plan need from the start of a process."""
    settings = {planned.name: planned.args for planned in (*plan.base, *plan.features)}
    given = {
        name: answer(feature, "process_variables", feature.Args(**settings[name]), plan.world)
        for name, feature in classes.items()
    }
    return {name: variables for name, variables in given.items() if variables}


def _named(layers: Sequence[Layer]) -> set[str]:
    """Features that the layers name, also as the value of a setting, and do not disable; for a choice, whoever there is."""
    given = (value for layer in layers for fields in layer.settings.values() for value in fields.values())
    values = {value for value in given if isinstance(value, str)}
    named = values.union(name for layer in layers for name in (*layer.features, *layer.settings))
    if AUTO in values:
        named |= catalog(frozenset()).not_loaded.keys()
    return named.difference(*(layer.disabled for layer in layers))


def plan(
    features: Iterable[str] = (),
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    environment: Environment | None = None,
    *,
    world: Mapping[str, Any] | None = None,
    without: Iterable[str] = (),
    level: int | None = None,
    strict: bool | None = None,
    only: bool | None = None,
    platform: str | None = None,
) -> ActivationPlan:
    """A validated plan for these features. Raises ResolutionError, whose ``problems`` holds every mistake.

    ``settings`` is ``{feature: {field: value}}``; ``world`` holds sizes and the model's shape by the names of
    `mindspeed.job.world.FIELDS`; ``environment`` is probed here unless given
    (`mindspeed.engine.resolution.environment.made_up`). Environment variables are read below these arguments. With ``only``
    the plan has the requested features and those that they or the sizes require, and no additions of optimization level 1.
    """
    api = layer_from_call(
        features=features,
        settings=settings,
        world=world,
        without=without,
        level=level,
        strict=strict,
        only=only,
        platform=platform,
    )
    if environment is not None and not isinstance(environment, Environment):
        text = f"the argument environment of mindspeed.plan is {environment!r}, but it must be an Environment"
        fix = Fix.advise(
            "leave environment out to plan for this machine. To plan for another one, such as an NPU with Megatron 0.16.1: "
            'from mindspeed.engine.resolution.environment import made_up; environment=made_up("npu", "0.16.1")'
        )
        raise ResolutionError([Problem("MS301", text, where="mindspeed.plan", fix=fix)])
    try:
        return resolve([layer_from_environment(os.environ), api], environment)
    except MindSpeedError as error:
        error.words = in_python
        if rendezvous.place_in(os.environ) is not None:
            uncaught.install()  # else each rank prints a traceback, and the others wait
        raise


@watched()
def activate(plan: ActivationPlan, facts: Mapping[str, str] | None = None) -> ActivationReport:
    """Patch this process with the plan. Idempotent for an equal plan, refuses a different one (MS405).

    ``facts`` are further facts of this process that must be equal on all ranks: ``{"option lr": "0.001"}``.

    In a job of several ranks nothing stays patched unless all of them activate equal plans: at once where the launcher
    keeps a store, as torchrun does, else in ``init_process_group`` (MS610 to MS612).
    """
    if not isinstance(plan, ActivationPlan):
        text = f"the argument of mindspeed.activate is {plan!r}, but it must be an ActivationPlan"
        fix = Fix.advise("mindspeed.activate(mindspeed.plan(features=[...]))")
        raise ResolutionError([Problem("MS301", text, where="mindspeed.activate", fix=fix)])
    was_active = session.current() is not None
    uncaught.install()
    try:
        refuse_disabled(plan)
        manager = build_plan.manager_of(plan, catalog_for(plan.names), base_features(plan.environment["platform"]))
        if not was_active and (broken := check_contracts(plan.patches, plan.environment.get("megatron"))):
            raise PatchError(broken)
        if not was_active and (
            wrong := variable_problems(_variables_of(plan, {f.spec.name: type(f) for f in manager.features}), os.environ)
        ):
            raise MindSpeedError(wrong)
        content = partial(_with_facts, plan, dict(facts or {}))
        report = session.start(plan, manager, Surroundings(content, activate_child, public_functions))
        if not was_active:
            rendezvous.begin(content)
    except Exception as error:
        rendezvous.report_failure(error)
        if not was_active:
            deactivate()
            uncaught.install()
        raise
    return report


def deactivate() -> DeactivationReport | None:
    """Undo the active plan; None when there is none."""
    rendezvous.end()
    uncaught.uninstall()
    return session.stop()


def report() -> EffectReport | None:
    """Report the effects of the active plan in this process so far; None without a plan."""
    return session.report()


@contextmanager
def step() -> Iterator[None]:
    """Mark one training step of a custom loop: ``with mindspeed.step(): ...``.

    Operators, and patches whose phase is the step, are counted from the first step on, and judged when it has ended. Loops of
    Megatron and `mindspeed pretrain` mark theirs. Does nothing without an active plan.
    """
    session.enter("step")
    yield
    session.enter(None)


def activate_from_environment(facts: Mapping[str, str] | None = None) -> ActivationReport | None:
    """Activate the plan in the file that ``MINDSPEED_PLAN`` names; None when it is not set. ``facts`` as in `activate`."""
    path = os.environ.get(PLAN_VARIABLE)
    return activate(read_plan(path), facts) if path else None


def activate_child(plan: str, path: Sequence[str]) -> None:
    """Activate a plan, given as JSON text, in a process that was spawned.

    ``path`` becomes the import path first, as multiprocessing makes it a moment later: the Megatron of a checkout may lie on
    it alone.
    """
    sys.path[:] = path
    activate(plan_from_json(json.loads(plan)))


def read_plan(path: str | Path) -> ActivationPlan:
    """Read a plan file. Raises MindSpeedError with MS305 when it is missing or damaged."""
    try:
        return plan_from_json(json.loads(Path(path).read_text(encoding="utf-8")))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        fix = Fix.advise(
            "write the file again with mindspeed features plan --json, or start the job again, which writes a new plan"
        )
        raise MindSpeedError([Problem("MS305", f"the plan file cannot be read: {error}", where=str(path), fix=fix)]) from error


def write_plan(plan: ActivationPlan, path: str | Path) -> None:
    """Write a plan file that `read_plan` reads."""
    replace_text(Path(path), json.dumps(plan.to_json(), indent=2) + "\n")
