from tests.features.resolving import active, refusals


def test_it_brings_the_layer_whose_capacity_it_sets():
    assert active("deepspeed-moe-dropless", num_experts=8)[-2:] == ["deepspeed-moe", "deepspeed-moe-dropless"]


def test_a_dense_model_is_refused_by_the_layer():
    assert refusals("deepspeed-moe-dropless") == [
        "MS304 deepspeed-moe: the model is dense, and deepspeed-moe works on experts | --num-experts N, or remove deepspeed-moe"
    ]
