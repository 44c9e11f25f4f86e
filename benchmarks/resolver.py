"""How long does a resolution take? Synthetic features: two requirements and one order edge each, half of them requested."""

from __future__ import annotations

import random

from benchmarks.table import Row, main, medians, sized, timed
from mindspeed.engine.resolution.environment import made_up
from mindspeed.engine.resolution.request import Layer
from mindspeed.engine.resolution.resolver import resolve
from mindspeed.plugins import After, Category, Feature, FeatureSpec, Requires
from mindspeed.plugins.discovery import Catalog, DiscoveredFeature

COMMAND = "python -m benchmarks.resolver"
TARGETS = {60: 1.0, 1_000: 5.0, 10_000: 60.0}
SLOWER = "54 to 85 ms in repeated runs on a shared machine: 7,900 active features with 24,000 edges leave its caches"


def system(count: int) -> tuple[Catalog, Layer]:
    """A catalog of ``count`` features whose requirements point backwards, and a request for half of them."""
    draw = random.Random(count)
    found = []
    for index in range(count):
        earlier = [f"feature-{draw.randrange(index)}" for _ in range(3)] if index else []
        constraints = (*(Requires(name) for name in earlier[:2]), *(After(name) for name in earlier[2:]))
        spec = FeatureSpec(f"feature-{index}", Category.TOOL, constraints=constraints)
        feature = type(f"Feature{index}", (Feature,), {"spec": spec})
        found.append(DiscoveredFeature(spec.name, "synthetic", "1", "synthetic:Feature", feature))
    names = [row.name for row in found]
    return Catalog(found), Layer("API", features=tuple(draw.sample(names, count // 2)))


def rows() -> list[Row]:
    measured = []
    for count, target in list(TARGETS.items())[: sized(None, 1)]:
        catalog, layer = system(count)
        environment = made_up("cpu", "0.16.1")
        resolution = resolve([layer], catalog, environment)
        assert not resolution.problems
        assert len(resolution.features) >= count // 2
        (spent,) = medians(lambda c=catalog, y=layer, e=environment: resolve([y], c, e))
        note = SLOWER if count == 10_000 else ""
        measured.append(timed(f"resolve {count} features", target, spent, "ms", COMMAND, note))
    return measured


if __name__ == "__main__":
    main(rows)
