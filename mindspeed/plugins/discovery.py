"""Finding features: the built-in folder walk and the entry points of other distributions.

A plugin that cannot be imported or contradicts itself becomes a row with its problem, never a crash.
"""

from __future__ import annotations

import importlib
import inspect
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from difflib import get_close_matches
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from mindspeed.plugins.constraints import (
    After,
    Before,
    Conflicts,
    Requires,
    RequiresAny,
    RequiresSlot,
    Supersedes,
)
from mindspeed.plugins.feature import Feature, FeatureArgs, FeatureSpec
from mindspeed.plugins.problems import Problem

ENTRY_POINTS: Final = "mindspeed.features"
BUILT_IN: Final = "mindspeed"
_FEATURES: Final = Path(__file__).resolve().parent.parent / "features"


@dataclass(frozen=True, slots=True)
class Found:
    """One discovered feature: where it comes from, its class if it loaded, its problem if it did not."""

    name: str
    distribution: str
    version: str
    reference: str
    feature: type[Feature[Any]] | None = None
    problem: Problem | None = None

    @property
    def state(self) -> str:
        """``ok``, ``broken``, or ``not imported``."""
        if self.problem is not None:
            return "broken"
        return "ok" if self.feature is not None else "not imported"

    @property
    def where(self) -> str:
        """Distribution, version and the line that declares the feature."""
        place = declared_at(self.feature) if self.feature is not None else self.reference
        return f"{self.distribution} {self.version}, {place}"


def declared_at(feature: type[Feature[Any]]) -> str:
    """``package/module.py:line`` of a feature class."""
    module = feature.__module__.replace(".", "/") + ".py"
    try:
        return f"{module}:{inspect.getsourcelines(feature)[1]}"
    except (OSError, TypeError):
        return module


class Catalog:
    """Every discovered feature by name, in name order; ``rows`` also holds the broken ones."""

    def __init__(self, rows: Iterable[Found]) -> None:
        self.rows: tuple[Found, ...] = tuple(_validated(_without_clashes(rows)))
        self.usable: dict[str, Found] = {row.name: row for row in self.rows if row.feature is not None and row.problem is None}
        self.broken: dict[str, Found] = {row.name: row for row in self.rows if row.problem is not None}
        self.specs: dict[str, FeatureSpec] = {name: self.feature(name).spec for name in self.usable}
        self.models: dict[str, type[FeatureArgs]] = {name: self.feature(name).Args for name in self.usable}
        self.requires: dict[str, tuple[Requires, ...]] = {
            name: tuple(c for c in spec.constraints if isinstance(c, Requires)) for name, spec in self.specs.items()
        }
        self.level_one = tuple(name for name, spec in self.specs.items() if spec.level == 1)
        self.owners: dict[str, tuple[str, str | None]] = {
            size: (name, argument) for name, spec in self.specs.items() for size, argument in spec.sizes.items()
        }

    def feature(self, name: str) -> type[Feature[Any]]:
        """The class of a usable feature."""
        feature = self.usable[name].feature
        if feature is None:
            raise KeyError(name)
        return feature

    def near(self, name: str) -> list[str]:
        """Up to three names that look like ``name``."""
        return get_close_matches(name.replace("_", "-").lower(), self.usable, n=3, cutoff=0.5)


def discover(import_third_parties: bool = True) -> Catalog:
    """Walk the built-in folder and the entry points. Imports light modules only, never torch or megatron."""
    return Catalog([*_built_in(), *_third_parties(import_third_parties)])


def _built_in() -> Iterator[Found]:
    from mindspeed import __version__

    for file in sorted(_FEATURES.glob("*/feature.py")):
        module = f"mindspeed.features.{file.parent.name}.feature"
        yield _load(Found(file.parent.name.replace("_", "-"), BUILT_IN, __version__, module))


def _third_parties(import_them: bool) -> Iterator[Found]:
    for entry in metadata.entry_points(group=ENTRY_POINTS):
        distribution, version = (entry.dist.name, entry.dist.version) if entry.dist else ("unknown", "unknown")
        found = Found(entry.name, distribution, version, entry.value)
        yield _load(found) if import_them else found


def _load(found: Found) -> Found:
    module_name, _, attribute = found.reference.partition(":")
    try:
        module = importlib.import_module(module_name)
        feature = getattr(module, attribute) if attribute else _only_feature(module)
        if not (isinstance(feature, type) and issubclass(feature, Feature) and hasattr(feature, "spec")):
            raise TypeError(f"{found.reference} is not a Feature class with a spec")
    except Exception as error:  # a plugin may fail in any way; it must not take the others with it
        return _broken(found, "MS101", f"feature {found.name} cannot be loaded: {type(error).__name__}: {error}")
    if feature.spec.name != found.name:
        text = f"feature {found.name} calls itself {feature.spec.name}; folder or entry point and spec.name must be equal"
        return _broken(found, "MS104", text)
    return replace(found, feature=feature)


def _only_feature(module: Any) -> type[Feature[Any]]:
    own = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Feature) and value.__module__ == module.__name__
    ]
    if len(own) != 1:
        raise TypeError(f"{module.__name__} defines {len(own)} features, not one")
    return own[0]


def _broken(found: Found, code: str, message: str) -> Found:
    fix = f"fix or uninstall {found.distribution}" if found.distribution != BUILT_IN else "reinstall mindspeed"
    return replace(found, problem=Problem(code, message, (found.name,), where=found.where, fix=fix))


def _without_clashes(rows: Iterable[Found]) -> Iterator[Found]:
    by_name: dict[str, list[Found]] = defaultdict(list)
    for row in rows:
        by_name[row.name].append(row)
    for name, same in sorted(by_name.items()):
        if len(same) == 1:
            yield same[0]
            continue
        built_in = [row for row in same if row.distribution == BUILT_IN]
        yield from built_in[:1]
        providers = " and ".join(sorted(f"{row.distribution} {row.version}" for row in same))
        for row in same if not built_in else [row for row in same if row.distribution != BUILT_IN]:
            yield _broken(row, "MS102", f"the feature name {name} is provided by {providers}")


def _validated(rows: Iterable[Found]) -> Iterator[Found]:
    rows = list(rows)
    specs = {row.name: row.feature.spec for row in rows if row.feature is not None and row.problem is None}
    slots = frozenset[str]().union(*(spec.slots for spec in specs.values()))
    names = {row.name for row in rows}
    for row in rows:
        if row.name not in specs or row.problem is not None or not row.feature:
            yield row
            continue
        for constraint in row.feature.spec.constraints:
            message = ""
            if isinstance(constraint, Requires | After | Before | Supersedes):
                unknown = [] if constraint.name in names else [constraint.name]
            elif isinstance(constraint, RequiresAny):
                unknown = [name for name in constraint.names if name not in names]
            elif isinstance(constraint, Conflicts):
                unknown = [] if constraint.name in names or constraint.name in slots else [constraint.name]
            elif isinstance(constraint, RequiresSlot):
                unknown = [] if constraint.slot in slots else [constraint.slot]
            else:
                continue
            if unknown:
                kind = type(constraint).__name__
                message = f"feature {row.name} declares {kind} on {', '.join(unknown)}, which no installed feature provides"
                yield _broken(row, "MS103", message)
                break
            if isinstance(constraint, Requires) and constraint.name in specs:
                shared = row.feature.spec.slots & specs[constraint.name].slots
                if shared:
                    held = ", ".join(sorted(shared))
                    message = f"feature {row.name} requires {constraint.name} and holds the same slot {held}"
                    yield _broken(row, "MS104", message)
                    break
        else:
            yield row
