"""Fused layers beside Megatron's own: values, bytes, calls and memory."""

from typing import Any

import pytest
import torch

import mindspeed
from benchmarks._linear_layers import run_both
from mindspeed.workbench.verification.pool import WorkerPool

LAYERS = "mindspeed.features.mc2.layers:Mc2ColumnParallelLinear,Mc2RowParallelLinear"


def both() -> Any:
    return run_both(LAYERS)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.long)])
def test_fused_layers_equal_megatrons_and_send_as_much(pool: WorkerPool, world: int) -> None:
    plan = mindspeed.plan(features=["mc2"], platform="cpu", world={"world_size": world, "tp": world})
    for rank in pool.call(both, world, plan=plan):
        for case, (megatrons, ours) in rank.items():
            for name, value in megatrons.values.items():
                torch.testing.assert_close(ours.values[name], value, rtol=1e-5, atol=1e-5)
            for direction in ("forward", "backward"):
                assert getattr(megatrons, direction) == getattr(ours, direction), (case, direction)
            assert ours.saved <= megatrons.saved, case
