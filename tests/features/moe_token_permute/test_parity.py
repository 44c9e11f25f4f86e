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
