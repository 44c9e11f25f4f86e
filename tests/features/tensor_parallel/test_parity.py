"""Tensor parallelism against one process."""

from __future__ import annotations

import pytest

from tests.conftest import Prove

pytestmark = pytest.mark.long


@pytest.mark.parametrize("size", [2, 4])
def test_split_weights_train_as_whole_ones(prove: Prove, size: int) -> None:
    verdict = prove("tensor-parallel", settings={"tensor-parallel": {"size": size}})
    assert verdict.problems == []
    assert verdict.proof.world["tp"] == size


def test_split_weights_train_as_whole_ones_in_a_llama(prove: Prove) -> None:
    assert prove("tensor-parallel", world={"normalization": "RMSNorm", "gated_linear_unit": True}).problems == []


def test_split_weights_train_as_whole_ones_in_bf16(prove: Prove) -> None:
    assert prove("tensor-parallel", world={"dtype": "bf16"}).problems == []


@pytest.mark.guards(48, processes=True)
def test_tensor_and_pipeline_parallel_compose(prove: Prove) -> None:
    verdict = prove("tensor-parallel", "pipeline-parallel")
    assert verdict.problems == []
    assert verdict.proof.world["world_size"] == 4


def test_tensor_and_data_parallel_compose(prove: Prove) -> None:
    assert prove("tensor-parallel", "data-parallel").problems == []
