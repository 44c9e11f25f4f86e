"""Made-up features and catalogs for tests of the framework."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mindspeed.engine.resolution.environment import made_up
from mindspeed.engine.resolution.request import Layer
from mindspeed.engine.resolution.resolver import Resolution, resolve
from mindspeed.plugins import Category, Feature, FeatureArgs, FeatureSpec
from mindspeed.plugins.discovery import Catalog, DiscoveredFeature

CPU = made_up("cpu", "0.16.1")


def make(name: str, *constraints: Any, args: type[FeatureArgs] = FeatureArgs, **spec: Any) -> type[Feature[Any]]:
    """A feature class without hooks."""
    declared = FeatureSpec(name, Category.TOOL, constraints=constraints, **spec)
    return type(name, (Feature,), {"__doc__": f"The feature {name}.", "spec": declared, "Args": args})


def catalog(*features: type[Feature[Any]]) -> Catalog:
    return Catalog(DiscoveredFeature(f.spec.name, "acme", "1.0", f"acme.{f.spec.name}", f) for f in features)


def ask(known: Catalog, *names: str, environment: Any = CPU, **layer: Any) -> Resolution:
    """Resolve one command-line layer."""
    return resolve([Layer("command line", features=names, **layer)], known, environment)


def codes(problems: Iterable[Any]) -> list[str]:
    return [problem.code for problem in problems]


def order(resolution: Resolution) -> list[str]:
    assert not resolution.problems, "\n".join(map(str, resolution.problems))
    return [feature.name for feature in resolution.features]
