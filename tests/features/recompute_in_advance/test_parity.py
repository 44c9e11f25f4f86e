"""Recomputation ahead of the gradient against Megatron without it: equal bits."""

from __future__ import annotations

import pytest

from tests.conftest import Prove

pytestmark = pytest.mark.long


@pytest.mark.parametrize("granularity", ["full", "selective"])
@pytest.mark.parametrize("vpp", [1, 2])
def test_layers_and_modules_recomputed_ahead_are_megatrons(prove: Prove, granularity: str, vpp: int) -> None:
    also = ["virtual-pipeline"] if vpp > 1 else ["pipeline-parallel"]
    settings = {"recompute-in-advance": {"granularity": granularity}}
    verdict = prove("recompute-in-advance", also=also, settings=settings, world={"pp": 2, "vpp": vpp}, nproc=2)
    assert verdict.problems == []


@pytest.mark.parametrize(
    ("also", "world"),
    [(["sequence-parallel"], {"tp": 2}), (["pipeline-parallel"], {"pp": 4}), (["nano-pipe", "distributed-optimizer"], {})],
    ids=["tp2-sp", "pp4", "nano-pipe-dp2"],
)
def test_layers_recomputed_ahead_on_four_ranks_are_megatrons(prove: Prove, also: list[str], world: dict[str, int]) -> None:
    world = {"pp": 2, "num_layers": 8, **world}
    assert prove("recompute-in-advance", also=["pipeline-parallel", *also], world=world, nproc=4).problems == []
