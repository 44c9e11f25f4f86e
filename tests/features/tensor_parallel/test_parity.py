"""Tensor parallelism against one process."""

import pytest

from tests.conftest import Prove
from tests.features.parity import given, trains

test_split_weights_train_as_whole_ones = trains(
    "tensor-parallel",
    {
        "llama": given(normalization="RMSNorm", gated_linear_unit=True),
        "fewer query groups than ranks": given(tp=2, num_query_groups=1),
        "bf16": given(dtype="bf16"),
        "replicas": given("data-parallel"),
    },
)


@pytest.mark.long
@pytest.mark.parametrize("size", [2, 4])
def test_split_weights_of_a_size_train_as_whole_ones(prove: Prove, size: int) -> None:
    verdict = prove("tensor-parallel", settings={"tensor-parallel": {"size": size}})
    assert verdict.problems == []
    assert verdict.proof.world["tp"] == size


@pytest.mark.long
@pytest.mark.guards(48, processes=True)
def test_tensor_and_pipeline_parallel_compose(prove: Prove) -> None:
    verdict = prove("tensor-parallel", "pipeline-parallel")
    assert verdict.problems == []
    assert verdict.proof.world["world_size"] == 4
