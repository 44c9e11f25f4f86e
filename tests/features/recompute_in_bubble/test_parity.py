"""Recomputation of few activations against Megatron without it: equal bits."""

from __future__ import annotations

import pytest

from tests.conftest import Prove

pytestmark = pytest.mark.long


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_interleaved_chunks_with_few_kept_activations_are_megatrons(prove: Prove, limit: int) -> None:
    settings = {"recompute-in-bubble": {"limit": limit}}
    world = {"pp": 2, "vpp": 2, "global_batch_size": 16}
    verdict = prove("recompute-in-bubble", also=["virtual-pipeline"], settings=settings, world=world, nproc=2)
    assert verdict.problems == []


@pytest.mark.parametrize(
    ("also", "world"),
    [(["sequence-parallel"], {"tp": 2, "vpp": 2}), (["pipeline-parallel"], {"pp": 4}), (["ring-attention"], {"cp": 2})],
    ids=["tp2-sp", "pp4", "cp2"],
)
def test_few_kept_activations_on_four_ranks_are_megatrons(prove: Prove, also: list[str], world: dict[str, int]) -> None:
    also = ["virtual-pipeline" if "vpp" in world else "pipeline-parallel", *also]
    world = {"pp": 2, "num_layers": 8, "global_batch_size": 8, **world}
    settings = {"recompute-in-bubble": {"limit": 1}}
    assert prove("recompute-in-bubble", also=also, settings=settings, world=world, nproc=4).problems == []
