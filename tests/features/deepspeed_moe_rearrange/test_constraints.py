from tests.features.resolving import active, refusals


def test_it_brings_the_layer_whose_table_it_fills():
    assert active("deepspeed-moe-rearrange", num_experts=8)[-2:] == ["deepspeed-moe", "deepspeed-moe-rearrange"]


def test_a_dense_model_is_refused_by_the_layer():
    assert refusals("deepspeed-moe-rearrange") == [
        "MS304 deepspeed-moe: the model is dense, and deepspeed-moe works on experts | --num-experts N, or remove deepspeed-moe"
    ]
