"""The permutation operators against Megatron's index functions, with each dispatcher."""

from __future__ import annotations

import pytest

from tests.conftest import Prove

pytestmark = pytest.mark.long


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_tokens_go_to_experts_and_back_as_in_megatron(prove: Prove, dtype: str) -> None:
    assert prove("moe-token-permute", world={"dtype": dtype}).problems == []


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_tokens_go_to_experts_of_other_ranks_and_back(prove: Prove, dispatcher: str, dtype: str) -> None:
    settings = {"expert-parallel": {"dispatcher": dispatcher}}
    verdict = prove("moe-token-permute", "expert-parallel", settings=settings, world={"dtype": dtype}, nproc=2)
    assert verdict.problems == []


def test_tokens_go_to_experts_that_tensor_ranks_share(prove: Prove) -> None:
    assert prove("moe-token-permute", also=["tensor-parallel", "sequence-parallel"], nproc=2).problems == []


BESIDE = {
    "all-to-all": ("moe-alltoall-dispatcher",),
    "all-gather": ("moe-allgather-dispatcher",),
    "all-to-all, overlapped": ("moe-alltoall-overlap",),
    "all-gather, overlapped": ("moe-allgather-overlap",),
    "level 0": ("moe-zero-memory",),
}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("features", BESIDE.values(), ids=BESIDE)
def test_the_dispatchers_of_other_features_take_the_operators(prove: Prove, features: tuple[str, ...], dtype: str) -> None:
    world = {"ep": 2, "dtype": dtype}
    assert prove("moe-token-permute", *features, world=world, nproc=2, steps=2).problems == []


def test_pairs_of_a_token_and_a_rank_take_the_operators(prove: Prove) -> None:
    settings = {"moe-alltoall-dispatcher": {"once_per_rank": True}}
    world = {"ep": 2, "router_topk": 4, "num_experts": 8}
    verdict = prove("moe-token-permute", "moe-alltoall-dispatcher", world=world, settings=settings, nproc=2, steps=2)
    assert verdict.problems == []
