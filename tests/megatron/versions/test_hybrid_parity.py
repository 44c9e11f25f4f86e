"""A HybridModel and the GPTModel of the same layers and weights are one function, on every Megatron that has both."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest

from mindspeed.engine.inspection.megatron_copies import version_of
from mindspeed.engine.resolution.environment import version_in
from tests.megatron.versions.conftest import Megatron
from tests.megatron.versions.hybrid_parity import CASES

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def found(megatron: Megatron) -> Mapping[str, Mapping[str, float]]:
    """The largest differences of every case."""
    if not version_in(version_of(megatron.folder / "megatron") or "0", ">=0.19"):
        pytest.skip(f"megatron-core {megatron.version} has no HybridModel that takes the place of GPTModel")
    printed = megatron.run("-m", "tests.megatron.versions.hybrid_parity").splitlines()[-1]
    answers: Mapping[str, Mapping[str, float]] = json.loads(printed)
    return answers


@pytest.mark.parametrize("name", CASES)
def test_both_models_train_alike(found: Mapping[str, Mapping[str, float]], name: str) -> None:
    assert set(found[name]) == {"loss over 5 steps", "input gradient", "gradient", "weight"}
    assert max(found[name].values()) <= 1e-6
