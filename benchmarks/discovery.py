"""What does it cost to load the sixty features of a full mindspeed, and to explain a conflict among ten thousand?"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.table import Row, Spent, main, medians, middle, repetitions, sized, timed
from mindspeed.engine.resolution.environment import made_up
from mindspeed.engine.resolution.request import Layer
from mindspeed.engine.resolution.resolver import resolve
from mindspeed.plugins import Category, Conflicts, Feature, FeatureSpec, Requires
from mindspeed.plugins.discovery import Catalog, DiscoveredFeature, discover

COMMAND = "python -m benchmarks.discovery"
FEATURES = 10_000
BUILT_IN = 60
FEATURE = """
from mindspeed.plugins import (
    After, ArgOverride, Category, Feature, FeatureArgs, FeatureSpec, Field, Requires, condition, hookimpl
)

class MadeArgs(FeatureArgs):
    size: int = Field(1, ge=1, description="a size")
    mode: str = Field("fast", description="a mode")

@condition("size {{args.size}} is greater than 8")
def size_fits(args, world):
    '''Check that the size is at most 8.'''
    return args.size <= 8

class Made{number}(Feature[MadeArgs]):
    '''Make up a feature.'''
    spec = FeatureSpec(
        name="made-{number}",
        category=Category.TOOL,
        constraints=(
            size_fits,
            After("{before}"),
        ),
    )

    @hookimpl
    def megatron_args(self):
        return [ArgOverride("hidden_dropout", 0.0, "a benchmark")]
"""


def packages(folder: Path, count: int) -> Path:
    """Make metadata and code of distributions with one feature each."""
    folder.mkdir()
    for number in range(count):
        info = folder / f"made_{number}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: made-{number}\nVersion: 1.0\nSummary: made up\n")
        (info / "entry_points.txt").write_text(f"[mindspeed.features]\nmade-{number} = made_{number}:Made{number}\n")
        (folder / f"made_{number}.py").write_text(
            FEATURE.format(number=number, before=f"made-{number - 1}" if number else "tensor-parallel")
        )
    return folder


def first_discovery(folder: Path) -> Spent:
    """The time in which a process that has imported pydantic loads the features of 60 packages beside the built-in ones."""
    program = (
        "import time, mindspeed.plugins.api; from mindspeed.plugins.discovery import discover; "
        "start = time.process_time(), time.perf_counter(); found = discover(); "
        "print(time.process_time() - start[0], time.perf_counter() - start[1]); assert len(found.usable) >= 60"
    )
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-c", program]
    environ = {**os.environ, "PYTHONPATH": path}
    runs = [
        subprocess.run(command, env=environ, check=True, stdout=subprocess.PIPE).stdout.split() for _ in range(repetitions(7))
    ]
    return middle([Spent(*map(float, run)) for run in runs])


def conflict(count: int) -> Spent:
    """The time of a resolution among 10,000 features that ends in a conflict between the ends of two chains of requirements."""
    found = []
    for number in range(count):
        constraints = [Requires(f"made-{number + 1}", reason="a benchmark")] if number % 100 != 99 else []
        if number == 50:
            constraints.append(Conflicts(f"made-{count - 1}", reason="a benchmark"))
        spec = FeatureSpec(f"made-{number}", Category.TOOL, constraints=tuple(constraints))
        feature = type(f"Made{number}", (Feature,), {"spec": spec})
        found.append(DiscoveredFeature(spec.name, "made", "1", "made:Made", feature))
    catalog, cpu = Catalog(found), made_up("cpu", "0.16.1")
    layer = Layer("API", features=("made-0", f"made-{count - 100}"))
    (problem,) = resolve([layer], catalog, cpu).problems
    assert problem.code == "MS202"
    assert len(problem.chain) == 151
    (spent,) = medians(lambda: resolve([layer], catalog, cpu))
    return spent


def rows() -> list[Row]:
    importlib.invalidate_caches()
    with tempfile.TemporaryDirectory() as folder:
        sixty = packages(Path(folder) / "sixty", BUILT_IN - len(discover(only=()).usable))
        discovered = first_discovery(sixty)
    return [
        timed(f"discover {BUILT_IN} features, first time in a process", 100, discovered, "ms", COMMAND),
        timed(f"explain a conflict among {FEATURES} features", 10, conflict(sized(FEATURES, 200)), "ms", COMMAND),
    ]


if __name__ == "__main__":
    main(rows)
