import pytest

from tests.features.resolving import active, ask


@pytest.mark.guards(26)
def test_it_brings_along_what_shards_and_buckets_the_weights():
    names = active("async-param-gather", world_size=2)
    assert names == ["data-parallel", "async-ddp", "distributed-optimizer", "async-param-gather"]


def test_the_plan_says_why_each_requirement_is_there():
    why = {feature.name: feature.why[0].line for feature in ask("async-param-gather", world_size=1).features}
    assert why["distributed-optimizer"] == (
        "distributed-optimizer: required by async-param-gather, because only a sharded optimizer has weights to gather after "
        "its step"
    )
    assert why["async-ddp"] == (
        "async-ddp: required by async-param-gather, because Megatron gathers weights bucket by bucket, and creates the "
        "buckets only with overlap_grad_reduce, which async-ddp switches on"
    )
