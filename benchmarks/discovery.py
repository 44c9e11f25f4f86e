"""What does it cost to know what is installed? Ten thousand made-up packages, and the sixty features of a full mindspeed."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.table import Row, main, medians
from mindspeed.plugins import Category, Conflicts, Feature, FeatureSpec, Requires
from mindspeed.plugins.discovery import Catalog, DiscoveredFeature, discover
from mindspeed.resolution.environment import made_up
from mindspeed.resolution.request import Layer
from mindspeed.resolution.resolver import resolve

COMMAND = "python -m benchmarks.discovery"
PACKAGES = 10_000
BUILT_IN = 60
LONG_AGO = 1_000_000_000
FEATURE = """
from mindspeed.plugins import After, ArgOverride, Category, Check, Feature, FeatureArgs, FeatureSpec, Field, Requires, hookimpl

class MadeArgs(FeatureArgs):
    size: int = Field(1, ge=1, description="a size")
    mode: str = Field("fast", description="a mode")

class Made{number}(Feature[MadeArgs]):
    '''Made up.'''
    spec = FeatureSpec(
        name="made-{number}",
        summary="made up",
        category=Category.TOOL,
        constraints=(
            Check(lambda args, world: args.size <= 8, "size {{args.size}} is above 8", fix="--set made-{number}.size=8"),
            After("{before}"),
        ),
    )

    @hookimpl
    def megatron_args(self):
        return [ArgOverride("hidden_dropout", 0.0, "a benchmark")]
"""


def packages(folder: Path, count: int, sources: bool = False) -> Path:
    """Metadata, and the code if wanted, of made-up distributions with one feature each."""
    folder.mkdir()
    for number in range(count):
        info = folder / f"made_{number}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: made-{number}\nVersion: 1.0\nSummary: made up\n")
        (info / "entry_points.txt").write_text(f"[mindspeed.features]\nmade-{number} = made_{number}:Made{number}\n")
        if sources:
            (folder / f"made_{number}.py").write_text(
                FEATURE.format(number=number, before=f"made-{number - 1}" if number else "tensor-parallel")
            )
    os.utime(folder, (LONG_AGO, LONG_AGO))  # a folder that has just changed is read again each time
    return folder


@contextmanager
def environment(folder: Path) -> Iterator[dict[str, str]]:
    """Variables for a process that sees the packages of ``folder`` and has an empty index."""
    with tempfile.TemporaryDirectory() as cache:
        yield {**os.environ, "PYTHONPATH": str(folder), "MINDSPEED_CACHE": cache}


def seconds(environ: dict[str, str], *arguments: str, repeat: int = 7) -> list[float]:
    """Seconds of whole processes of the command line, one after the other."""
    spent = []
    for _ in range(repeat):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "mindspeed", *arguments], env=environ, check=True, capture_output=True)
        spent.append(time.perf_counter() - start)
    return spent


def listing(folder: Path) -> tuple[float, float]:
    """Seconds of ``features list --no-import`` with an empty index (the best of five) and with a filled one (median)."""
    cold = []
    for _ in range(5):
        with environment(folder) as environ:
            cold += seconds(environ, "features", "list", "--no-import", repeat=1)
            warm = seconds(environ, "features", "list", "--no-import")
    return min(cold), sorted(warm)[len(warm) // 2]


def first_discovery(folder: Path) -> float:
    """Seconds in which a process that has imported pydantic loads the features of 60 packages beside the built-in ones."""
    program = (
        "import time, mindspeed.plugins.api; from mindspeed.plugins.discovery import discover; "
        "start = time.perf_counter(); found = discover(); print(time.perf_counter() - start); assert len(found.usable) >= 60"
    )
    with environment(folder) as environ:
        runs = [
            float(subprocess.run([sys.executable, "-c", program], env=environ, check=True, capture_output=True).stdout)
            for _ in range(7)
        ]
    return sorted(runs)[len(runs) // 2]


def conflict() -> float:
    """Seconds of a resolution among 10,000 features that ends in a conflict between the ends of two chains of requirements."""
    found = []
    for number in range(PACKAGES):
        constraints = [Requires(f"made-{number + 1}", reason="a benchmark")] if number % 100 != 99 else []
        if number == 50:
            constraints.append(Conflicts(f"made-{PACKAGES - 1}", reason="a benchmark"))
        spec = FeatureSpec(f"made-{number}", "made up", Category.TOOL, constraints=tuple(constraints))
        feature = type(f"Made{number}", (Feature,), {"spec": spec})
        found.append(DiscoveredFeature(spec.name, "made", "1", "made:Made", feature))
    catalog, cpu = Catalog(found), made_up("cpu", "0.16.1")
    layer = Layer("API", features=("made-0", f"made-{PACKAGES - 100}"))
    (problem,) = resolve([layer], catalog, cpu).problems
    assert problem.code == "MS202"
    assert len(problem.chain) == 151
    (spent,) = medians(lambda: resolve([layer], catalog, cpu))
    return spent


def rows() -> list[Row]:
    importlib.invalidate_caches()
    with tempfile.TemporaryDirectory() as folder:
        many = packages(Path(folder) / "many", PACKAGES)
        cold, warm = listing(many)
        sixty = packages(Path(folder) / "sixty", BUILT_IN - len(discover(import_third_parties=False).usable), sources=True)
        discovered = first_discovery(sixty)
    return [
        Row(f"list {PACKAGES} packages from metadata, index empty", 0.8, cold, "s", COMMAND),
        Row(f"list {PACKAGES} packages from metadata, index filled", 0.15, warm, "s", COMMAND),
        Row(f"discover {BUILT_IN} features, first time in a process", 100, discovered * 1e3, "ms", COMMAND),
        Row(f"explain a conflict among {PACKAGES} features", 10, conflict() * 1e3, "ms", COMMAND),
    ]


if __name__ == "__main__":
    main(rows)
