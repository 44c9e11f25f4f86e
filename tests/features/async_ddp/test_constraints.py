from tests.features.resolving import overrides


def test_bucket_size_reaches_megatron_only_when_given():
    assert overrides("async-ddp") == {"overlap_grad_reduce": True}
    assert overrides("async-ddp", bucket_size=4096) == {"overlap_grad_reduce": True, "bucket_size": 4096}
