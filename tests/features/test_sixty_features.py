"""Thirty-three more features leave the default run in its budget: their claims tests, measured."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest

from mindspeed import registry
from mindspeed.workbench.verification.case import VerificationCase, build_case
from mindspeed.workbench.verification.harness import verify
from mindspeed.workbench.verification.pool import SharedBroker, WorkerPool
from tests.budgets import FEATURE_LIMIT, slowness
from tests.features.test_claims import STEPS

COUNT = 33
LAYOUTS = ("", "data-parallel", "tensor-parallel")
"""What a third of the features requires each: one process, or two."""
TOTAL = 90.0
"""CPU seconds that their claims tests may take together: 45 s of the eight minutes on two cores."""
CLIENTS = 2
"""Processes of a default run, which share one broker; here they are threads."""

FEATURE = '''
from mindspeed.plugins import Category, Feature, FeatureArgs, FeatureSpec, Numerics, Patch, Requires, Wrap, hookimpl


class Made{number}(Feature[FeatureArgs]):
    """A wrap that changes nothing."""

    spec = FeatureSpec(
        name="made-{number}",
        category=Category.TOOL,
        constraints={constraints},
        numerics=Numerics.reordered(),
    )

    @hookimpl
    def patches(self) -> list[Patch]:
        return [Wrap("megatron.core.transformer.mlp:MLP.forward", "made_glue:unchanged", reason="measured")]
'''
GLUE = """
from functools import wraps


def unchanged(original):
    @wraps(original)
    def forward(*args, **kwargs):
        return original(*args, **kwargs)

    return forward
"""


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """An installed distribution with the made-up features."""
    (tmp_path / "made_glue.py").write_text(GLUE)
    entries = []
    for number in range(COUNT):
        needed = LAYOUTS[number % len(LAYOUTS)]
        constraints = f'(Requires("{needed}", reason="measured"),)' if needed else "()"
        (tmp_path / f"made_{number}.py").write_text(FEATURE.format(number=number, constraints=constraints))
        entries.append(f"made-{number} = made_{number}:Made{number}\n")
    info = tmp_path / "made_ms-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: made-ms\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[mindspeed.features]\n{''.join(entries)}")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(registry, "catalog", lru_cache(registry.catalog.__wrapped__))
    return [f"made-{number}" for number in range(COUNT)]


@pytest.mark.long
def test_the_claims_of_thirty_three_more_features_stay_in_the_budget(
    names: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = time.perf_counter()
    cases = {name: build_case([name]) for name in names}
    broker = SharedBroker(search_path=[str(tmp_path)])
    try:
        with ThreadPoolExecutor(CLIENTS) as clients:
            parts = clients.map(
                lambda part: cpu_seconds(part, cases, broker.address), [names[i::CLIENTS] for i in range(CLIENTS)]
            )
            took = {name: seconds for part in parts for name, seconds in part.items()}
    finally:
        broker.close()
    slowest, total, wall = max(took, key=took.__getitem__), sum(took.values()), time.perf_counter() - start
    with capsys.disabled():
        print(
            f"\n{COUNT} features: {total:.0f} CPU s, {wall:.0f} s by the clock; {slowest} the most, {took[slowest]:.1f} CPU s"
        )
    assert took[slowest] <= FEATURE_LIMIT
    assert total <= TOTAL


def cpu_seconds(names: list[str], cases: dict[str, VerificationCase], address: str) -> dict[str, float]:
    """Run the claims tests of features one after the other, as one process of a test run: CPU seconds of an idle machine."""
    took: dict[str, float] = {}
    with WorkerPool(address=address) as pool:
        for name in names:
            before, case = pool.cpu_seconds, cases[name]
            assert verify(replace(case, recipe=replace(case.recipe, steps=STEPS)), pool).problems == []
            took[name] = (pool.cpu_seconds - before) / slowness()
    return took
