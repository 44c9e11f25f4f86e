from tests.features.resolving import active


def test_level_one_switches_it_on_where_both_operators_have_a_variant_and_there_are_experts():
    everywhere = {"has_variant": lambda op, platform: True}
    assert "moe-token-permute" in active(world_size=1, num_experts=4, **everywhere)
    assert "moe-token-permute" not in active(world_size=1, **everywhere)
    one = {"has_variant": lambda op, platform: op != "npu_fused_moe_token_unpermute"}
    assert "moe-token-permute" not in active(world_size=1, num_experts=4, **one)
