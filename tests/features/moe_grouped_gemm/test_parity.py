"""Grouped experts against Megatron's single experts with the same weights: its grouped ones need a CUDA package."""

from __future__ import annotations

import pytest

from tests.conftest import Prove

pytestmark = pytest.mark.long


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_grouped_experts_are_spread_over_ranks(prove: Prove, dtype: str) -> None:
    assert prove("moe-grouped-gemm", "expert-parallel", world={"dtype": dtype}, nproc=2).problems == []


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_grouped_experts_are_split_by_tensor_ranks(prove: Prove, dtype: str) -> None:
    also = ["tensor-parallel", "sequence-parallel"]
    assert prove("moe-grouped-gemm", also=also, world={"dtype": dtype}, nproc=2).problems == []
