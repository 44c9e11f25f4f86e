"""Every built-in feature keeps its claim against the baseline, in the smallest surroundings in which it does its work."""

from __future__ import annotations

import pytest

from mindspeed.registry import catalog
from tests.conftest import Prove

FEATURES = catalog(frozenset()).specs
STEPS = 2


def four_ranks(name: str) -> bool:
    """Whether the smallest surroundings of a feature are four ranks, which takes too long for a default run."""
    return FEATURES[name].verify_with.world.get("cp", 1) == 4


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if four_ranks(name) else name for name in sorted(FEATURES)]
)
def test_a_feature_keeps_its_claim(prove: Prove, name: str) -> None:
    assert prove(name, steps=STEPS).problems == []
