from tests.features.resolving import active, refusals


def test_it_brings_grouped_experts_along():
    assert active("grouped-matmul-add", world_size=1, num_experts=4) == ["moe-grouped-gemm", "grouped-matmul-add"]


def test_a_dense_model_is_refused():
    assert refusals("grouped-matmul-add", world_size=1) == [
        "MS304 moe-grouped-gemm: the model is dense, and moe-grouped-gemm works on experts "
        "| --num-experts N, or remove moe-grouped-gemm"
    ]


def test_level_one_switches_it_on_where_experts_are_grouped_and_both_operators_have_a_variant():
    everywhere = {"has_variant": lambda op, platform: True}
    grouped = {"world_size": 1, "num_experts": 4, "grouped_experts": True}
    assert "grouped-matmul-add" in active(**grouped, **everywhere)
    assert "grouped-matmul-add" not in active(**grouped | {"grouped_experts": False}, **everywhere)
    assert "grouped-matmul-add" not in active(**grouped, has_variant=lambda op, platform: op == "npu_gmm")
