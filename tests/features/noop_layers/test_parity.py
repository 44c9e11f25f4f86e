"""Chunks of different sizes against one process."""

from __future__ import annotations

import pytest

from tests.conftest import Prove

pytestmark = pytest.mark.long


@pytest.mark.parametrize("layers", ["auto", (0, 5)], ids=["auto", "places"])
@pytest.mark.parametrize("world", [{}, {"dtype": "bf16"}], ids=["fp32", "bf16"])
def test_uneven_stages_train_as_one_process(prove: Prove, layers: object, world: dict[str, object]) -> None:
    shape = {"pp": 2, "num_layers": 4, "vpp": 1, **world}
    assert prove("noop-layers", settings={"noop-layers": {"layers": layers}}, world=shape).problems == []


def test_uneven_chunks_with_recompute_train_as_one_process(prove: Prove) -> None:
    settings = {"recompute": {"granularity": "full", "method": "uniform", "num_layers": 1}}
    assert prove("noop-layers", settings=settings, also=["recompute"]).problems == []


def test_uneven_stages_with_experts_train_as_one_process(prove: Prove) -> None:
    settings = {"noop-layers": {"layers": (0, 5)}}
    world = {"pp": 2, "num_layers": 4, "vpp": 1}
    assert prove("noop-layers", settings=settings, world=world, also=["moe-token-permute"], nproc=2).problems == []


@pytest.mark.parametrize("world", [{"pp": 4}, {"tp": 2}], ids=["pp4", "tp2"])
def test_uneven_stages_on_four_ranks_train_as_one_process(prove: Prove, world: dict[str, object]) -> None:
    shape = {"pp": 2, "num_layers": 6, "vpp": 1, **world}
    assert prove("noop-layers", settings={"noop-layers": {"layers": (0, 7)}}, world=shape, nproc=4).problems == []
