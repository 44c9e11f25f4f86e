"""The attention operator against Megatron's core attention."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import Prove

pytestmark = pytest.mark.long


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("also", [[], ["tensor-parallel"]], ids=["one process", "two tensor-parallel processes"])
def test_the_operator_trains_as_megatron(prove: Prove, dtype: str, also: list[str]) -> None:
    assert prove("flash-attention", *also, world={"dtype": dtype}).problems == []


CASES: dict[str, tuple[list[str], dict[str, Any], dict[str, Any]]] = {
    "shared key heads": ([], {}, {"num_query_groups": 2}),
    "a causal mode that reads no mask": ([], {"flash-attention": {"sparse_mode": 3}}, {"num_query_groups": 1}),
    "a window as long as the sequence": ([], {"flash-attention": {"sparse_mode": 4}}, {}),
    "sequence parallel": (["sequence-parallel"], {}, {"num_query_groups": 2}),
    "recomputed core attention": (["recompute"], {}, {}),
    "pipeline": (["pipeline-parallel"], {}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_training_is_that_of_megatron(prove: Prove, case: str) -> None:
    also, settings, world = CASES[case]
    assert prove("flash-attention", *also, settings=settings, world=world).problems == []


FULL = {"recompute": {"granularity": "full", "method": "uniform", "num_layers": 1}}


@pytest.mark.parametrize("settings", [{}, FULL], ids=["core attention", "whole layers"])
@pytest.mark.parametrize("also", [[], ["tensor-parallel"]], ids=["one process", "two tensor-parallel processes"])
def test_recomputation_drops_the_same_elements_again(prove: Prove, also: list[str], settings: dict[str, Any]) -> None:
    """Recompute claims equal bits, so that both runs have dropout; and both have this feature."""
    verdict = prove("recompute", also=["flash-attention", *also], settings=settings)
    assert verdict.problems == []
    assert verdict.proof.sites_reached["flash-attention"]["fusion_attention"] > 0
