"""Gradient accumulation fusion against Megatron's own gradients, in one buffer and in reduced buckets."""

from __future__ import annotations

import pytest

from tests.conftest import Prove

pytestmark = pytest.mark.long


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_gradients_added_by_the_product_are_megatrons(prove: Prove, dtype: str) -> None:
    assert prove("matmul-add", world={"dtype": dtype}).problems == []


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_gradients_added_by_the_product_are_megatrons_under_tensor_parallelism(prove: Prove, dtype: str) -> None:
    assert prove("matmul-add", also=["tensor-parallel"], world={"dtype": dtype}, nproc=2).problems == []


def test_they_are_megatrons_under_sequence_parallelism(prove: Prove) -> None:
    assert prove("matmul-add", "sequence-parallel", nproc=2).problems == []


@pytest.mark.parametrize("also", [["async-ddp"], ["async-ddp", "distributed-optimizer"]], ids=", ".join)
def test_hooks_that_reduce_a_bucket_wait_for_what_was_added_to_it(prove: Prove, also: list[str]) -> None:
    assert prove("matmul-add", *also, nproc=2).problems == []


def test_the_linear_layers_of_experts_add_their_gradients_too(prove: Prove) -> None:
    verdict = prove("matmul-add", "expert-parallel", nproc=2)
    assert verdict.problems == []


def test_a_pipeline_of_four_stages_adds_gradients_in_each(prove: Prove) -> None:
    assert prove("matmul-add", "pipeline-parallel", world={"pp": 2, "tp": 2}, nproc=4).problems == []
