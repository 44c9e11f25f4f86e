from tests.features.resolving import active, overrides


def test_it_brings_data_parallel_along_also_for_a_single_replica():
    assert active("distributed-optimizer", world_size=1) == ["data-parallel", "distributed-optimizer"]
    assert active("distributed-optimizer", world_size=2) == ["data-parallel", "distributed-optimizer"]


def test_it_switches_megatrons_flag_on():
    assert overrides("distributed-optimizer") == {"use_distributed_optimizer": True}
