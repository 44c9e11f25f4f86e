"""Settings beside the sizes, and limits at which Megatron still trains: each against the unmodified baseline."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import Prove

pytestmark = pytest.mark.long

CASES: dict[str, tuple[list[str], dict[str, dict[str, Any]], dict[str, Any]]] = {
    "recompute of MLPs": (["recompute", "rms-norm"], {"recompute": {"modules": ["mlp"]}}, {}),
    "recompute of experts": (["recompute", "expert-parallel"], {"recompute": {"modules": ["moe"]}}, {}),
    "recompute of distributed inputs": (
        ["recompute", "tensor-parallel"],
        {"recompute": {"granularity": "full", "method": "uniform", "num_layers": 1, "distribute": True}},
        {"tp": 2},
    ),
    "freed pipeline outputs": (["pipeline-parallel"], {"pipeline-parallel": {"free_outputs": True}}, {"pp": 2}),
    "small gradient buckets": (["async-ddp"], {"async-ddp": {"bucket_size": 5000}}, {}),
    "whole experts beside split attention": (
        ["expert-parallel"],
        {"expert-parallel": {"expert_tensor_size": 1}},
        {"tp": 2, "ep": 2},
    ),
    "fewer query groups than ranks": (["tensor-parallel"], {}, {"tp": 2, "num_query_groups": 1}),
}


@pytest.mark.parametrize("case", CASES)
def test_training_is_that_of_the_baseline(prove: Prove, case: str) -> None:
    names, settings, world = CASES[case]
    assert prove(*names, settings=settings, world=world).problems == []
