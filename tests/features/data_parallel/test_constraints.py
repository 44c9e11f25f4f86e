import pytest

from tests.features.resolving import active, overrides, refusals


def test_more_processes_than_the_other_sizes_need_add_the_feature():
    assert active(world_size=8, tp=2, pp=2) == ["data-parallel", "pipeline-parallel", "tensor-parallel"]
    assert active(world_size=4, tp=2, pp=2) == ["pipeline-parallel", "tensor-parallel"]


@pytest.mark.guards(24)
def test_the_global_batch_is_a_multiple_of_what_all_replicas_take():
    assert refusals(world_size=8, tp=2, micro_batch_size=2, global_batch_size=24) == []
    assert refusals(world_size=8, tp=2, micro_batch_size=2, global_batch_size=20) == [
        "MS304 data-parallel: global batch size 20 is not divisible by micro batch size x dp = 2 x 4 "
        "| --global-batch-size 24 (a multiple of 2 x 4)"
    ]


def test_gradients_are_reduced_in_fp32_on_request_only():
    assert overrides("data-parallel") == {}
    assert overrides("data-parallel", reduce_in_fp32=True) == {"grad_reduce_in_fp32": True}
