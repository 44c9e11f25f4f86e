from tests.features.resolving import active, overrides, refusals


def test_it_brings_data_parallel_along():
    assert active("async-ddp", world_size=2) == ["data-parallel", "async-ddp"]


def test_a_bucket_holds_at_least_one_parameter():
    assert refusals("async-ddp", settings={"async-ddp": {"bucket_size": 1}}) == []
    assert refusals("async-ddp", settings={"async-ddp": {"bucket_size": 0}}) == [
        "MS301 async-ddp.bucket_size is 0: input should be greater than or equal to 1 "
        "| --set async-ddp.bucket_size=1 (parameters per bucket; Megatron's choice if not given)"
    ]


def test_bucket_size_reaches_megatron_only_when_given():
    assert overrides("async-ddp") == {"overlap_grad_reduce": True}
    assert overrides("async-ddp", bucket_size=4096) == {"overlap_grad_reduce": True, "bucket_size": 4096}
