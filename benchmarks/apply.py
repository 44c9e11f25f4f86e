"""What does a plan of 60 features cost once megatron is imported, and how long does a comparison with a checkout take?"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from benchmarks.patching import LOADED, real_targets
from benchmarks.table import Row, Spent, main, medians, middle, repetitions, sized, timed
from mindspeed.engine.resolution.environment import made_up
from mindspeed.engine.resolution.request import Layer
from mindspeed.plugins import ArgOverride, Category, Feature, FeatureSpec, Patch, Requires, hookimpl
from mindspeed.plugins.discovery import Catalog, DiscoveredFeature

COMMAND = "python -m benchmarks.apply"
COUNT = 60
TARGETS = {"cuda": 25, "cpu": 80}
"""Milliseconds by platform; that of the CPU replaces dozens of functions of torch."""
OURS = (
    *(f"mindspeed.megatron.{name}" for name in ("argument_overrides", "hook_points", "hook_wrappers")),
    *(f"mindspeed.megatron.fixes.{name}" for name in ("groups", "kernels", "layers", "moe", "numpy2", "optimizer", "saving")),
)
"""Modules that a plan names, whose import is not measured."""


def features(count: int) -> list[DiscoveredFeature]:
    """Features with one patch of a loaded Megatron each; every second one requires the one before, every tenth sets a value."""
    return [_found(index, planned.patch) for index, planned in enumerate(real_targets(count))]


def _found(index: int, patch: Patch) -> DiscoveredFeature:
    constraints = (Requires(f"feature-{index - 1}"),) if index % 2 else ()
    override = [ArgOverride("bias_dropout_fusion", False, "measured")] if index % 10 == 0 else []
    members = {
        "spec": FeatureSpec(f"feature-{index}", Category.TOOL, constraints=constraints),
        "patches": hookimpl(lambda self: [patch]),
        "megatron_args": hookimpl(lambda self: override),
    }
    return DiscoveredFeature(
        f"feature-{index}", "synthetic", "1", "synthetic:Feature", type(f"Feature{index}", (Feature,), members)
    )


def measure(count: int, platform: str) -> dict[str, Spent]:
    """The time of the parts, in this process: every module that they need is loaded, nothing else has been asked yet."""
    for name in (*LOADED, *filter(find_spec, OURS)):  # another checkout may lack one
        import_module(name)
    from mindspeed import registry
    from mindspeed.engine.patching.apply import apply
    from mindspeed.engine.planning.build_plan import manager_of

    catalog, environment = Catalog(features(count)), made_up(platform, "0.16.1")
    base = registry.base_features(platform)
    layer = Layer("API", features=tuple(catalog.usable))
    start = Spent.now()
    plan = registry.resolve([layer], environment, catalog)
    resolved = Spent.now()
    manager_of(plan, catalog, base)
    applied = apply(plan.patches)
    end = Spent.now()
    assert len(plan.features) == count
    assert sum(not site.pending for site in applied.sites) >= count
    return {"resolve": resolved.since(start), "apply": end.since(resolved), "both": end.since(start)}


def in_new_processes(repeat: int, platform: str) -> dict[str, Spent]:
    """Medians of `measure` over processes; the first of them, not counted, reads the contracts that the others recall."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.apply", "--measure", str(sized(COUNT, 4)), platform]
    runs = []
    for _ in range(repetitions(repeat) + sized(1, 0)):
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        runs.append({part: Spent(*spent) for part, spent in json.loads(done.stdout.splitlines()[-1]).items()})
    return {part: middle([run[part] for run in runs[1:] or runs]) for part in runs[0]}


def drift() -> Spent:
    """``mindspeed patches drift`` against the installed sources, as against a checkout; whole process."""
    import megatron.core

    path = str(Path(megatron.core.__file__).parents[2])
    command = [sys.executable, "-m", "mindspeed", "patches", "drift", "--megatron", path, "--json"]
    (spent,) = medians(lambda: subprocess.run(command, check=False, capture_output=True), repeat=5)
    return spent


def rows() -> list[Row]:
    made = []
    for platform, target in TARGETS.items():
        spent = in_new_processes(5, platform)
        note = (
            f"resolve and check {spent['resolve'].cpu * 1e3:.1f} ms, apply {spent['apply'].cpu * 1e3:.1f} ms, most of it the "
            "search for aliases: it reads the globals of all modules that can hold a patched object, and remembers nothing"
        )
        what = f"resolve and apply {COUNT} features for {platform} on loaded megatron"
        made.append(timed(what, target, spent["both"], "ms", COMMAND, note))
    if repetitions(5) == 5:  # all of Megatron is read
        made.append(timed("patches drift against a source tree, whole process", 3, drift(), "s", COMMAND))
    return made


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure(int(sys.argv[2]), sys.argv[3])))
    else:
        main(rows)
