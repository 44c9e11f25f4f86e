from tests.features.resolving import active, overrides


def test_the_size_reaches_megatron_under_its_name():
    assert active(tp=8) == ["tensor-parallel"]
    assert overrides("tensor-parallel", size=8) == {"tensor_model_parallel_size": 8}
