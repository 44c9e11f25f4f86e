"""Made-up features and catalogs for tests of the framework."""

from collections.abc import Callable, Iterable
from typing import Any

from mindspeed.engine.resolution.environment import made_up
from mindspeed.engine.resolution.request import Layer
from mindspeed.engine.resolution.resolver import Resolution, resolve
from mindspeed.plugins import Category, Feature, FeatureArgs, FeatureSpec
from mindspeed.plugins.discovery import Catalog, DiscoveredFeature
from mindspeed.plugins.hookspecs import HOOKS

CPU = made_up("cpu", "0.16.1")


def make(name: str, *constraints: Any, args: type[FeatureArgs] = FeatureArgs, **spec: Any) -> type[Feature[Any]]:
    """A feature class, whose hooks of the planner are functions of its arguments and the job (``cost=by_heads``)."""
    hooks = {hook: _method(spec.pop(hook)) for hook in list(spec) if hook in HOOKS}
    declared = FeatureSpec(name, Category.TOOL, constraints=constraints, **spec)
    return type(name, (Feature,), {"__doc__": f"The feature {name}.", "spec": declared, "Args": args, **hooks})


def _method(function: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
    def hook(self: Feature[Any]) -> Any:
        return function(self.args, self.world)

    return hook


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
