from tests.features.resolving import active, not_checked, overrides, refusals


def test_a_size_above_one_adds_the_feature_and_its_pipeline():
    assert active(world_size=2, pp=2, vpp=2) == ["pipeline-parallel", "virtual-pipeline"]


def test_one_chunk_per_stage_is_refused():
    assert refusals("virtual-pipeline", world_size=2, pp=2) == [
        "MS304 virtual-pipeline: at least two model chunks per stage are needed, but vpp is 1 "
        "| --vpp 2 or more, or remove virtual-pipeline"
    ]


def test_one_stage_is_refused():
    assert refusals(world_size=2, vpp=2) == [
        "MS304 virtual-pipeline: at least two pipeline stages are needed, but pp is 1 "
        "| --pp 2 or more, or remove virtual-pipeline"
    ]


def test_two_stages_need_overlapped_communication():
    settings = {"virtual-pipeline": {"overlap_p2p": False}}
    assert refusals(world_size=4, pp=4, vpp=2, settings=settings) == []
    assert refusals(world_size=2, pp=2, vpp=2, settings=settings) == [
        "MS304 virtual-pipeline: two pipeline stages cannot interleave chunks without overlapped communication "
        "| --set virtual-pipeline.overlap_p2p=true"
    ]


def test_layers_are_split_evenly_over_chunks():
    assert refusals(world_size=2, pp=2, vpp=3, num_layers=12) == []
    assert refusals(world_size=2, pp=2, vpp=3, num_layers=8) == [
        "MS304 virtual-pipeline: 8 layers are not divisible by pp x vpp = 2 x 3 model chunks "
        "| --pp N --vpp N (their product divides 8), or add noop-layers to the features"
    ]


def test_micro_batches_are_a_multiple_of_the_stages():
    assert refusals(world_size=4, pp=2, vpp=2, micro_batch_size=2, global_batch_size=16) == []
    assert refusals(world_size=4, pp=2, vpp=2, micro_batch_size=2, global_batch_size=12) == [
        "MS304 virtual-pipeline: 3 micro-batches per step are not a multiple of 2 pipeline stages "
        "| --global-batch-size N (a multiple of micro batch size x dp x pp = 2 x 2 x 2)"
    ]


def test_a_batch_smaller_than_one_micro_batch_is_refused():
    assert refusals(world_size=2, pp=2, vpp=2, micro_batch_size=4, global_batch_size=2) == [
        "MS304 virtual-pipeline: 0 micro-batches per step are not a multiple of 2 pipeline stages "
        "| --global-batch-size N (a multiple of micro batch size x dp x pp = 4 x 1 x 2)"
    ]


def test_an_unknown_model_is_not_checked():
    rows = not_checked(pp=2, vpp=2)
    assert "'? layers are not divisible by pp x vpp = 2 x 2 model chunks' depends on num_layers; give --num-layers" in rows
    assert (
        "'? micro-batches per step are not a multiple of 2 pipeline stages' depends on global_batch_size; "
        "give --global-batch-size" in rows
    )


def test_overlap_switches_batched_sends_off():
    assert overrides("virtual-pipeline", size=2) == {
        "virtual_pipeline_model_parallel_size": 2,
        "overlap_p2p_comm": True,
        "batch_p2p_comm": False,
    }
    assert overrides("virtual-pipeline", size=2, overlap_p2p=False) == {"virtual_pipeline_model_parallel_size": 2}
