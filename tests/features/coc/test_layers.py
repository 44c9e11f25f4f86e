"""Layers in parts beside Megatron's own: bits, bytes, calls, memory and overlap."""

from typing import Any

import pytest
import torch

import mindspeed
from benchmarks._linear_layers import hidden_by_coc, run_both
from mindspeed.workbench.verification.pool import WorkerPool

PARTS = 4
LAYERS = "mindspeed.features.coc.layers:CocColumnParallelLinear,CocRowParallelLinear"
WORLDS = [2, pytest.param(4, marks=pytest.mark.long)]


def plan(world: int, **platform: Any) -> Any:
    settings = {"coc": {"parts": PARTS}, "device-emulation": platform}
    return mindspeed.plan(features=["coc"], platform="cpu", settings=settings, world={"world_size": world, "tp": world})


def both() -> Any:
    return run_both(LAYERS)


@pytest.mark.parametrize("world", WORLDS)
def test_layers_in_parts_equal_megatrons_to_the_bit_and_to_the_byte(pool: WorkerPool, world: int) -> None:
    for rank in pool.call(both, world, plan=plan(world)):
        for case, (megatrons, ours) in rank.items():
            assert megatrons.values.keys() <= ours.values.keys(), case
            for name, value in megatrons.values.items():
                if case == "all-reduced" and world > 2:  # the ring of gloo's all-reduce begins elsewhere in each part
                    torch.testing.assert_close(ours.values[name], value, msg=lambda text, n=name: f"{n}: {text}")
                else:
                    assert torch.equal(ours.values[name], value), (case, name)
            for direction in ("forward", "backward"):
                one, other = getattr(megatrons, direction), getattr(ours, direction)
                assert {kind: count.bytes for kind, count in one.items()} == {k: c.bytes for k, c in other.items()}, case
            assert ours.saved <= megatrons.saved, case
        calls = {kind: count.calls for (kind, _), count in rank["sequence parallel"][1].forward.items()}
        assert calls == {"all_gather": PARTS, "reduce_scatter": PARTS}


@pytest.mark.parametrize("late", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_link_as_slow_as_the_products_is_hidden_but_for_one_part_unless_it_is_launched_late(
    pool: WorkerPool, late: bool
) -> None:
    for rank in pool.call(hidden_by_coc, 2, late, plan=plan(2, link_gbps=1)):
        for (name, parts), share in rank.items():
            assert (share >= 0.9 * (1 - 1 / parts)) is not late, (name, parts)
