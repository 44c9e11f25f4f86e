"""Thirty-three more features leave the default run in its budget: their claims tests, measured."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest

from mindspeed import registry
from mindspeed.verification.case import build_case
from mindspeed.verification.harness import verify
from mindspeed.verification.pool import WorkerPool
from tests.budgets import FEATURE_LIMIT, slowness
from tests.features.test_claims import STEPS

COUNT = 33
LAYOUTS = ("", "data-parallel", "tensor-parallel")
"""What a third of the features requires each: one process, or two."""
TOTAL = 90.0
"""Seconds that their claims tests may take together, of the eight minutes on two cores."""

FEATURE = '''
from mindspeed.plugins import Category, Feature, FeatureArgs, FeatureSpec, Numerics, Patch, Requires, Wrap, hookimpl


class Made{number}(Feature[FeatureArgs]):
    """A wrap that changes nothing."""

    spec = FeatureSpec(
        name="made-{number}",
        summary="made up",
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
def test_the_claims_of_thirty_three_more_features_stay_in_the_budget(names: list[str], tmp_path: Path) -> None:
    took: dict[str, float] = {}
    with WorkerPool(search_path=[str(tmp_path)]) as pool:
        for name in names:
            start, before = time.perf_counter(), pool.cpu_seconds
            case = build_case([name])
            assert verify(replace(case, recipe=replace(case.recipe, steps=STEPS)), pool).problems == []
            took[name] = min(time.perf_counter() - start, pool.cpu_seconds - before) / slowness()
    print(f"{COUNT} features: {sum(took.values()):.0f} s, the slowest {max(took.values()):.1f} s")
    assert max(took.values()) <= FEATURE_LIMIT
    assert sum(took.values()) <= TOTAL
