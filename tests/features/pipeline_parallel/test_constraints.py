from tests.features.resolving import active, not_checked, overrides, refusals


def test_a_size_above_one_adds_the_feature():
    assert active(world_size=4, pp=4) == ["pipeline-parallel"]


def test_layers_are_split_evenly():
    assert refusals(world_size=4, pp=4, num_layers=12) == []
    assert refusals(world_size=4, pp=4, num_layers=10) == [
        "MS304 pipeline-parallel: 10 layers are not divisible by 4 pipeline stages "
        "| --pp N (a divisor of 10), or add noop-layers to the features"
    ]


def test_an_unknown_number_of_layers_is_not_checked():
    assert not_checked(pp=2) == ["'? layers are not divisible by 2 pipeline stages' depends on num_layers; give --num-layers"]


def test_offloading_by_megatron_is_refused_for_more_than_one_stage():
    assert refusals(pp=1, cpu_offloading=True) == []
    assert refusals(world_size=2, pp=2, cpu_offloading=True) == [
        "MS304 pipeline-parallel: Megatron offloads activations to host memory, which pipeline-parallel does not support "
        "| --no-cpu-offloading, or remove pipeline-parallel"
    ]


def test_sent_outputs_are_freed_on_request_only():
    assert overrides("pipeline-parallel", size=2) == {"pipeline_model_parallel_size": 2}
    assert overrides("pipeline-parallel", size=2, free_outputs=True) == {
        "pipeline_model_parallel_size": 2,
        "deallocate_pipeline_outputs": True,
    }
