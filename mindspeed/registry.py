"""The front door: discover features, resolve a request into a plan, activate it.

>>> plan = mindspeed.plan(features=["tensor-parallel"], settings={"tensor-parallel": {"size": 2}})
>>> report = mindspeed.activate(plan)
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from mindspeed.planning import build_plan
from mindspeed.planning.fingerprint import content_of
from mindspeed.planning.kill_switch import disabled_layer, refuse_disabled
from mindspeed.planning.patch_checks import check_contracts
from mindspeed.planning.plan import ActivationPlan, plan_from_json
from mindspeed.plugins.constraints import AUTO
from mindspeed.plugins.discovery import Catalog, DiscoveredFeature, discover
from mindspeed.plugins.problems import MindSpeedError, PatchError, Problem, ResolutionError
from mindspeed.plugins.tracing import trace, tracing
from mindspeed.resolution.environment import Environment, probe
from mindspeed.resolution.request import Layer, layer_from_environment
from mindspeed.resolution.resolution_state import HasVariant
from mindspeed.resolution.resolver import resolve as resolve_names
from mindspeed.runtime import rendezvous, session
from mindspeed.runtime.effects import EffectReport
from mindspeed.runtime.session import ActivationReport, DeactivationReport, suspended

__all__ = ["activate", "activate_from_environment", "catalog", "deactivate", "defaults", "plan", "resolve", "suspended"]

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
    """The default of every setting, ``{feature: {setting: value}}``; pure, and without torch and megatron.

    A setting that has no default is left out.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, model in catalog().models.items():
        optional = {key: field for key, field in model.model_fields.items() if not field.is_required()}
        found[name] = {key: field.get_default(call_default_factory=True) for key, field in optional.items()}
    return found


def resolve(layers: Sequence[Layer], environment: Environment | None = None, known: Catalog | None = None) -> ActivationPlan:
    """Turn request layers (low to high) into a plan. Raises ResolutionError with every problem.

    Without ``known``, of other distributions only the named features are loaded, and what those require.
    """
    from mindspeed.ops.variants import has_variant
    from mindspeed.platforms import base_features

    layers = [*layers, disabled_layer()]
    known = known or catalog_for(_named(layers))
    platform = next((layer.platform for layer in reversed(layers) if layer.platform), None)
    environment = environment or probe(platform)
    if platform is not None and platform != environment.platform:
        environment = replace(environment, platform=platform)
    runs: HasVariant = has_variant
    if environment.source == "probed":
        from mindspeed.ops.availability import running

        runs = running(environment.platform)
    resolution = resolve_names(layers, known, environment, base_features(environment.platform), runs)
    if resolution.problems:
        raise ResolutionError(resolution.problems)
    made = build_plan.build_plan(resolution, known, environment)
    if tracing():  # the digest of a large plan takes a while
        trace("resolved", f"{', '.join(made.names) or 'no features'}; plan {made.digest}")
    return made


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
    platform: str | None = None,
) -> ActivationPlan:
    """A validated plan for these features. Raises ResolutionError, whose ``problems`` holds every mistake.

    ``settings`` is ``{feature: {field: value}}``; ``world`` holds sizes and the model's shape by the names of
    `mindspeed.plugins.world.FIELDS`; ``environment`` is probed here unless given
    (`mindspeed.resolution.environment.made_up`). Environment variables are read below these arguments.
    """
    api = Layer("API", tuple(features), settings or {}, world or {}, tuple(without), level, strict, platform)
    return resolve([layer_from_environment(os.environ), api], environment)


def activate(plan: ActivationPlan) -> ActivationReport:
    """Patch this process as the plan says. Idempotent for an equal plan, refuses a different one (MS405).

    In a job of several ranks nothing stays patched unless all of them activate equal plans: at once where the launcher
    keeps a store, as torchrun does, else in ``init_process_group`` (MS610 to MS612).
    """
    was_active = session.current() is not None
    try:
        refuse_disabled(plan)
        manager = build_plan.manager_of(plan, catalog_for(plan.names))
        if not was_active and (broken := check_contracts(plan.patches, plan.environment.get("megatron"))):
            raise PatchError(broken)
        report = session.start(plan, manager)
        if not was_active:
            rendezvous.begin(lambda: content_of(plan, catalog_for(plan.names)))
    except Exception as error:
        rendezvous.report_failure(error)
        if not was_active:
            deactivate()
        raise
    return report


def deactivate() -> DeactivationReport | None:
    """Undo the active plan; None when there is none."""
    rendezvous.end()
    return session.stop()


def report() -> EffectReport | None:
    """What the active plan has done in this process so far; None when there is none."""
    return session.report()


def activate_from_environment() -> ActivationReport | None:
    """Activate the plan in the file that ``MINDSPEED_PLAN`` names; None when it is not set."""
    path = os.environ.get(PLAN_VARIABLE)
    return activate(read_plan(path)) if path else None


def read_plan(path: str | Path) -> ActivationPlan:
    """Read a plan file. Raises MindSpeedError with MS305 when it is missing or damaged."""
    try:
        return plan_from_json(json.loads(Path(path).read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MindSpeedError([Problem("MS305", f"the plan cannot be read: {error}", where=str(path))]) from error


def write_plan(plan: ActivationPlan, path: str | Path) -> None:
    """Write a plan file that `read_plan` reads."""
    Path(path).write_text(json.dumps(plan.to_json(), indent=2) + "\n", encoding="utf-8")
