"""The attention operator against Megatron's core attention."""

from typing import Any

import pytest

from tests.conftest import Prove
from tests.features.parity import DTYPES, FULL, given, trains

test_the_operator_trains_as_megatron = trains(
    "flash-attention",
    {dtype: given(dtype=dtype) for dtype in DTYPES}
    | {f"tensor ranks, {dtype}": given("tensor-parallel", dtype=dtype) for dtype in DTYPES}
    | {
        "shared key heads": given(num_query_groups=2),
        "a causal mode that reads no mask": given(settings={"flash-attention": {"sparse_mode": 3}}, num_query_groups=1),
        "a window as long as the sequence": given(settings={"flash-attention": {"sparse_mode": 4}}),
        "keys wider than values": given(multi_latent_attention=True),
        "sequence parallel": given("sequence-parallel", num_query_groups=2),
        "recomputed core attention": given("recompute"),
        "pipeline": given("pipeline-parallel"),
    },
)


@pytest.mark.long
@pytest.mark.parametrize("settings", [{}, FULL], ids=["core attention", "whole layers"])
@pytest.mark.parametrize("also", [[], ["tensor-parallel"]], ids=["one process", "two tensor-parallel processes"])
def test_recomputation_drops_the_same_elements_again(prove: Prove, also: list[str], settings: dict[str, Any]) -> None:
    """Recompute claims equal bits, so that both runs have dropout; and both have this feature."""
    verdict = prove("recompute", also=["flash-attention", *also], settings=settings)
    assert verdict.problems == []
    assert verdict.proof.sites_reached["flash-attention"]["fusion_attention"] > 0
