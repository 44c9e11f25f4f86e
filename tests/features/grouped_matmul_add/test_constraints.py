from __future__ import annotations

from tests.features.resolving import active, not_checked, overrides, refusals


def test_a_dense_model_is_refused():
    assert refusals("grouped-matmul-add", world_size=1, num_experts=4) == []
    assert refusals("grouped-matmul-add", world_size=1) == [
        "MS304 grouped-matmul-add: there are no experts to group, the model is dense "
        "| --num-experts N, or remove grouped-matmul-add"
    ]


def test_an_unknown_model_is_not_checked():
    assert not_checked("grouped-matmul-add") == [
        "'there are no experts to group, the model is dense' depends on num_experts; give --num-experts"
    ]


def test_level_one_switches_it_on_where_experts_are_grouped_and_both_operators_have_a_variant():
    everywhere = {"has_variant": lambda op, platform: True}
    grouped = {"world_size": 1, "num_experts": 4, "grouped_experts": True}
    assert "grouped-matmul-add" in active(**grouped, **everywhere)
    assert "grouped-matmul-add" not in active(**grouped | {"grouped_experts": False}, **everywhere)
    assert "grouped-matmul-add" not in active(**grouped, has_variant=lambda op, platform: op != "npu_gmm")


def test_it_groups_experts_that_are_single():
    assert overrides("grouped-matmul-add") == {"moe_grouped_gemm": True}
