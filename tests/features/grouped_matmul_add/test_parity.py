"""Grouped experts against Megatron's single experts with the same weights: its grouped ones need a CUDA package."""

from __future__ import annotations

import pytest

from tests.conftest import Prove

pytestmark = pytest.mark.long


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_grouped_experts_train_as_single_ones(prove: Prove, dtype: str) -> None:
    assert prove("grouped-matmul-add", world={"dtype": dtype}).problems == []


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_grouped_experts_are_spread_over_ranks(prove: Prove, dtype: str) -> None:
    assert prove("grouped-matmul-add", "expert-parallel", world={"dtype": dtype}, nproc=2).problems == []


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_grouped_experts_are_split_by_tensor_ranks(prove: Prove, dtype: str) -> None:
    also = ["tensor-parallel", "sequence-parallel"]
    assert prove("grouped-matmul-add", also=also, world={"dtype": dtype}, nproc=2).problems == []


def test_hooks_that_reduce_a_bucket_wait_for_what_was_added_to_it(prove: Prove) -> None:
    assert prove("grouped-matmul-add", "matmul-add", "async-ddp", "distributed-optimizer", nproc=2).problems == []


def test_all_operators_of_experts_compose(prove: Prove) -> None:
    names = ("grouped-matmul-add", "matmul-add", "moe-token-permute", "expert-parallel")
    assert prove(*names, settings={"expert-parallel": {"dispatcher": "allgather"}}, nproc=2).problems == []
