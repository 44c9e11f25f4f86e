"""Loading features: the built-in ones, and of other distributions those that are wanted.

A plugin that cannot be imported or contradicts itself becomes a row with its problem, never a crash.
"""

from __future__ import annotations

import dis
import importlib
import json
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from mindspeed.plugins.answers import implements
from mindspeed.plugins.class_import import import_class
from mindspeed.plugins.conditions import Condition, ModelCondition
from mindspeed.plugins.constraints import (
    After,
    Before,
    Conflicts,
    Constraint,
    Requires,
    RequiresAny,
    RequiresCapability,
    RequiresSlot,
)
from mindspeed.plugins.declared_types import DeclarationError
from mindspeed.plugins.feature import Feature, FeatureArgs, FeatureSpec
from mindspeed.plugins.found import BUILT_IN, DiscoveredFeature, installed, of_folders
from mindspeed.problems import MindSpeedError, near_names
from mindspeed.process.gc_pause import collector_paused
from mindspeed.process.providers import note_provider
from mindspeed.process.tracing import trace
from mindspeed.process.watchdog import running, watched

__all__ = ["BUILT_IN", "Catalog", "DiscoveredFeature", "discover", "features_beside_platforms"]


class Catalog:
    """Every discovered feature by name, in name order; ``rows`` also holds the broken ones and those not loaded."""

    def __init__(self, rows: Iterable[DiscoveredFeature]) -> None:
        self.rows: tuple[DiscoveredFeature, ...] = tuple(_validated(sorted(rows, key=lambda row: row.name)))
        self.names = frozenset(row.name for row in self.rows)
        self.usable: dict[str, DiscoveredFeature] = {row.name: row for row in self.rows if row.feature is not None}
        self.broken: dict[str, DiscoveredFeature] = {row.name: row for row in self.rows if row.problem is not None}
        self.not_loaded: dict[str, DiscoveredFeature] = {row.name: row for row in self.rows if row.state == "not loaded"}
        self.specs: dict[str, FeatureSpec] = {name: self.feature(name).spec for name in self.usable}
        self.categories: dict[str, str] = {name: spec.category.value for name, spec in self.specs.items()}
        self.models: dict[str, type[FeatureArgs]] = {name: self.feature(name).Args for name in self.usable}
        self.requires: dict[str, tuple[Requires, ...]] = {
            name: tuple(c for c in spec.constraints if isinstance(c, Requires)) for name, spec in self.specs.items()
        }
        self.choosers = tuple(
            name
            for name, spec in self.specs.items()
            if any(isinstance(c, RequiresSlot) and c.setting for c in spec.constraints)
        )
        self.describing = self._implementing("job_values", "layer_split", "megatron_args")
        """Features whose settings decide fields of the job."""
        self.noting = self._implementing("notes")
        self.level_one = tuple(name for name, spec in self.specs.items() if spec.level == 1)
        self.following: dict[str, str] = {name: spec.follows for name, spec in self.specs.items() if spec.follows}
        """Features that a flag of the job adds, with the flag."""
        self.owners: dict[str, tuple[str, str | None]] = {
            size: (name, argument) for name, spec in self.specs.items() for size, argument in spec.sizes.items()
        }

    def feature(self, name: str) -> type[Feature[Any]]:
        """The class of a usable feature."""
        feature = self.usable[name].feature
        if feature is None:
            raise KeyError(name)
        return feature

    def _implementing(self, *hooks: str) -> frozenset[str]:
        return frozenset(name for name in self.usable if any(implements(self.feature(name), hook) for hook in hooks))

    def near(self, name: str) -> list[str]:
        """Up to three names that look like ``name``."""
        return near_names(name.replace("_", "-").lower(), [*self.usable, *self.not_loaded])


@collector_paused()
@watched()
def discover(only: Iterable[str] | None = None) -> Catalog:
    """Load the built-in features and those of other distributions. Imports light modules only, never torch or megatron.

    With ``only``, of other distributions those with these names are loaded, and what they require; the rest are rows from
    metadata alone. A feature that asks for a slot which nothing loaded has makes everything load: it cannot be judged
    without.
    """
    rows = installed()
    if only is None:
        return Catalog(_load(row) for row in rows)
    loaded = {row.name: _load(row) for row in rows if row.distribution == BUILT_IN}
    others = {row.name: row for row in rows if row.distribution != BUILT_IN and row.problem is None}
    queue = deque(only)
    while queue:
        name = queue.popleft()
        if name in others and name not in loaded:
            loaded[name] = _load(others[name])
            queue += [c.name for c in _constraints(loaded[name]) if isinstance(c, Requires)]
    if others.keys() - loaded.keys() and _asks_for_more(loaded.values(), {row.name for row in rows}):
        return Catalog(_load(row) for row in rows)
    return Catalog(row if row.problem is not None else loaded.get(row.name, row) for row in rows)


@cache
def features_beside_platforms() -> tuple[type[Feature[Any]], ...]:
    """The built-in features that every plan of their platforms has by itself. Raises MindSpeedError where one is broken."""
    rows = [_load(row) for row in of_folders("base")]
    if problems := [row.problem for row in rows if row.problem is not None]:
        raise MindSpeedError(problems)
    return tuple(row.feature for row in rows if row.feature is not None)


def _constraints(row: DiscoveredFeature) -> tuple[Constraint, ...]:
    return row.feature.spec.constraints if row.feature is not None else ()


def _asks_for_more(loaded: Collection[DiscoveredFeature], names: Collection[str]) -> bool:
    """Return whether a feature names a slot that no loaded feature holds and that is no feature either."""
    slots = frozenset[str]().union(*(row.feature.spec.slots for row in loaded if row.feature is not None))
    about_slots = RequiresSlot | RequiresCapability | After | Before | Conflicts
    return any(
        isinstance(constraint, about_slots) and _unprovided(constraint, names, slots)
        for row in loaded
        for constraint in _constraints(row)
    )


def _load(found: DiscoveredFeature) -> DiscoveredFeature:
    if found.problem is not None:
        return found
    module_name, _, attribute = found.reference.partition(":")
    note_provider(module_name, found.distribution, found.version)
    start = time.perf_counter()
    try:
        with running(f"the import of feature {found.name}", module_name):
            feature = import_class(module_name, attribute) if attribute else _only_feature(importlib.import_module(module_name))
            feature = getattr(feature, "as_mindspeed_feature", lambda: feature)()
            _require_declaration(found, feature)
    except DeclarationError as error:
        return found.broken("MS104", f"the declaration of feature {found.name} is wrong: {error}")
    except BaseException as error:  # a plugin may fail in any way; it must not take the others with it
        if isinstance(error, KeyboardInterrupt) and not _raised_by_code(error):
            raise
        text = str(error)
        return found.broken("MS101", f"feature {found.name} cannot be loaded: {type(error).__name__}{text and ': '}{text}")
    if feature.spec.name != found.name:
        text = (
            f"the folder or entry point {found.name} and spec.name {feature.spec.name} of a feature differ; they must be equal"
        )
        return found.broken("MS104", text)
    trace("loaded", f"{found.name} of {found.distribution} {found.version} in {(time.perf_counter() - start) * 1e3:.1f} ms")
    return replace(found, feature=feature)


def _require_declaration(found: DiscoveredFeature, feature: Any) -> None:
    """Raise TypeError, DeclarationError or an error of pydantic for what is no feature, or has settings of unusable types."""
    if not (isinstance(feature, type) and issubclass(feature, Feature) and hasattr(feature, "spec")):
        raise TypeError(f"{found.reference} is not a Feature class with a spec")
    if not isinstance(feature.spec, FeatureSpec):
        raise DeclarationError(f"spec is {feature.spec!r}, not a FeatureSpec")
    if found.distribution == BUILT_IN:
        return  # its settings are complete when they are used
    feature.Args.model_rebuild()
    defaults = feature.Args.model_construct()
    for name in feature.Args.model_fields.keys() & vars(defaults).keys():
        try:
            json.dumps(defaults.model_dump(mode="json", include={name}))
        except Exception as error:
            raise DeclarationError(f"the default of the setting {name} cannot be written as JSON: {error}") from error


def _raised_by_code(error: BaseException) -> bool:
    """Return whether a statement raised an error, and no signal."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and dis.opname[trace.tb_frame.f_code.co_code[trace.tb_lasti]] == "RAISE_VARARGS"


def _only_feature(module: Any) -> type[Feature[Any]]:
    own = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Feature) and value.__module__ == module.__name__
    ]
    if len(own) != 1:
        raise TypeError(f"{module.__name__} must define exactly one feature, but defines {len(own)}")
    return own[0]


def _validated(rows: Iterable[DiscoveredFeature]) -> Iterator[DiscoveredFeature]:
    rows = list(rows)
    specs = {row.name: row.feature.spec for row in rows if row.feature is not None}
    names = {row.name for row in rows}
    slots = frozenset[str]().union(*(spec.slots for spec in specs.values()))
    for row in rows:
        mistakes = (_mistake(row, constraint, specs, names, slots) for constraint in _constraints(row))
        yield next(filter(None, mistakes), row)


def _mistake(
    row: DiscoveredFeature,
    constraint: Any,
    specs: Mapping[str, FeatureSpec],
    names: Collection[str],
    slots: Collection[str],
) -> DiscoveredFeature | None:
    """The row with its problem if the constraint names nothing installed, or requires another holder of the same slot."""
    if unknown := _unprovided(constraint, names, slots):
        declared = f"{type(constraint).__name__} on {', '.join(unknown)}"
        return row.broken("MS103", f"feature {row.name} declares {declared}, which no installed feature provides")
    other = specs.get(constraint.name) if isinstance(constraint, Requires) else None
    if other is not None and (shared := specs[row.name].slots & other.slots):
        text = f"feature {row.name} requires {other.name}, but both hold the slot {', '.join(sorted(shared))}"
        return row.broken("MS104", text)
    return None


def _unprovided(constraint: Any, names: Collection[str], slots: Collection[str]) -> list[str]:
    """The features and slots that a constraint names and that are not among these."""
    if isinstance(constraint, Condition | ModelCondition):
        return []
    if isinstance(constraint, RequiresSlot | RequiresCapability):
        return [] if constraint.slot in slots else [constraint.slot]
    if isinstance(constraint, After | Before | Conflicts) and constraint.name in slots:
        return []
    wanted = constraint.names if isinstance(constraint, RequiresAny) else (constraint.name,)
    return [name for name in wanted if name not in names]
