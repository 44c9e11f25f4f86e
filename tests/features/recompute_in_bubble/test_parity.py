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
