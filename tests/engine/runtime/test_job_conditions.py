"""Conditions that are asked about the configuration that a process builds."""

from types import SimpleNamespace

import pytest

from mindspeed.engine.runtime import session
from mindspeed.engine.runtime.job_conditions import features_without
from mindspeed.plugins import MindSpeedError, World
from tests.features.resolving import CATALOG

NAMES = ("moe-grouped-gemm", "moe-adaptive-recompute", "swap-optimizer")


@pytest.fixture(autouse=True)
def active_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan whose model has experts, and whose features are all requested."""
    kinds = [CATALOG.feature(name) for name in NAMES]
    features = [kind(kind.Args(), World({"num_experts": 4})) for kind in kinds]
    monkeypatch.setattr(session, "current", lambda: SimpleNamespace(manager=SimpleNamespace(features=features)))


def test_a_dense_model_beside_the_experts_is_left_alone_by_what_works_on_experts_and_by_what_requires_it():
    dense = {"num_experts": 0, "linear_bias": True, "low_precision": True}
    assert features_without(dense) == {"moe-grouped-gemm", "moe-adaptive-recompute"}


def test_the_model_with_experts_is_judged():
    assert features_without({"num_experts": 4, "linear_bias": False}) == frozenset()
    with pytest.raises(MindSpeedError) as error:
        features_without({"num_experts": 4, "linear_bias": True})
    assert str(error.value) == (
        "MS304 moe-grouped-gemm: linear layers have biases, which moe-grouped-gemm does not support\n"
        "  fix: --no-linear-bias, or remove moe-grouped-gemm"
    )
