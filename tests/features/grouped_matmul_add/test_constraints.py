from tests.features.resolving import active


def test_level_one_switches_it_on_where_experts_are_grouped_and_both_operators_have_a_variant():
    everywhere = {"has_variant": lambda op, platform: True}
    grouped = {"world_size": 1, "num_experts": 4, "grouped_experts": True}
    assert "grouped-matmul-add" in active(**grouped, **everywhere)
    assert "grouped-matmul-add" not in active(**grouped | {"grouped_experts": False}, **everywhere)
    assert "grouped-matmul-add" not in active(**grouped, has_variant=lambda op, platform: op == "npu_gmm")
