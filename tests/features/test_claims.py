"""Every built-in feature keeps its claim against the baseline, in the smallest surroundings in which it does its work."""

import pytest

from mindspeed.registry import catalog
from tests.conftest import Prove

FEATURES = catalog(frozenset()).specs
STEPS = 2
BATCH = 4
"""Samples of a step: two for each of two ranks, or twice as many as stages."""


def four_ranks(name: str) -> bool:
    """Whether the smallest surroundings of a feature have four ranks."""
    return FEATURES[name].verify_with.world.get("cp", 1) == 4


def marks_of(name: str) -> list[pytest.MarkDecorator]:
    """Four ranks are for the long run; a baseline that has ranks of its own takes as long as the feature."""
    if four_ranks(name):
        return [pytest.mark.long]
    return [pytest.mark.budget(6)] if FEATURES[name].verify_with.features else []


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks_of(name)) for name in sorted(FEATURES)])
def test_a_feature_keeps_its_claim(prove: Prove, name: str) -> None:
    assert prove(name, world={"global_batch_size": BATCH}, steps=STEPS).problems == []
