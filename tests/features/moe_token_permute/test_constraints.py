from tests.features.resolving import active, not_checked, refusals


def test_a_dense_model_is_refused():
    assert refusals("moe-token-permute", world_size=1, num_experts=4) == []
    assert refusals("moe-token-permute", world_size=1) == [
        "MS304 moe-token-permute: the model is dense, and moe-token-permute works on experts "
        "| --num-experts N, or remove moe-token-permute"
    ]


def test_an_unknown_model_is_not_checked():
    assert not_checked("moe-token-permute") == [
        "'the model is dense, and moe-token-permute works on experts' depends on num_experts; give --num-experts"
    ]


def test_level_one_switches_it_on_where_both_operators_have_a_variant_and_there_are_experts():
    everywhere = {"has_variant": lambda op, platform: True}
    assert "moe-token-permute" in active(world_size=1, num_experts=4, **everywhere)
    assert "moe-token-permute" not in active(world_size=1, **everywhere)
    one = {"has_variant": lambda op, platform: op != "npu_fused_moe_token_unpermute"}
    assert "moe-token-permute" not in active(world_size=1, num_experts=4, **one)
