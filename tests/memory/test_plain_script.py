"""A plain loop over megatron-core with each feature: equal losses and weights, and fewer bytes by the C library's count."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mindspeed import registry
from mindspeed.planning.plan import ActivationPlan
from mindspeed.resolution.request import Layer
from mindspeed.verification.pool import WorkerPool
from tests.memory.plain_job import train

pytestmark = pytest.mark.long

WORLD: dict[str, Any] = {"world_size": 1, "num_layers": 4, "dtype": "bf16", "num_experts": 0}
SETTINGS = {"reuse-fp32-param": {"parts": 4}, "swap-optimizer": {"parts": 4}}
SMALLER = ("norm-recompute", "activation-recompute", "reuse-fp32-param")
"""The features after which the process has fewer bytes; what is swapped is host memory, which the C library counts too."""


def plan_of(*names: str) -> ActivationPlan:
    without = tuple(name for name in registry.catalog().usable if registry.catalog().feature(name).spec.level == 1)
    settings = {name: SETTINGS[name] for name in names if name in SETTINGS}
    layer = Layer("test", features=names, settings=settings, world=WORLD, without=without, platform="cpu")
    return registry.resolve([layer])


@pytest.mark.parametrize(
    "name", ["norm-recompute", "activation-recompute", "swap-attention", "reuse-fp32-param", "swap-optimizer"]
)
def test_a_plain_loop_trains_as_without_the_feature_in_fewer_bytes(pool: WorkerPool, name: str) -> None:
    (stock,) = pool.call(train, 1, plan=plan_of())
    runs = [pool.call(train, 1, evaluates, plan=plan_of(name))[0] for evaluates in (False, True)]
    for run in runs:
        assert run["losses"] == stock["losses"]
        assert all(np.array_equal(left, right) for left, right in zip(stock["weights"], run["weights"], strict=True))
    found, before = (run["kept"] + run["rest"] for run in (runs[0], stock))
    assert found < before if name in SMALLER else found <= 1.02 * before
