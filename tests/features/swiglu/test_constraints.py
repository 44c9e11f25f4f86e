from __future__ import annotations

import pytest

from tests.features.resolving import active, not_checked, overrides, refusals


@pytest.mark.parametrize(("activation", "gated"), [("gelu", True), ("silu", False)])
def test_another_activation_is_refused(activation, gated):
    assert refusals("swiglu", world_size=1, activation=activation, gated_linear_unit=gated) == [
        f"MS304 swiglu: the MLP is not SwiGLU: activation {activation}, gated {gated} "
        "| --activation silu --gated-linear-unit, or take out swiglu"
    ]


def test_a_gated_silu_is_accepted():
    assert refusals("swiglu", world_size=1) == []


def test_level_one_switches_it_on_where_it_has_a_variant_and_the_mlp_is_swiglu():
    everywhere = {"has_variant": lambda op, platform: True}
    assert "swiglu" in active(world_size=1, **everywhere)
    assert "swiglu" not in active(world_size=1, activation="gelu", **everywhere)
    assert "swiglu" not in active(world_size=1)


def test_an_unknown_activation_is_not_checked():
    assert not_checked("swiglu") == [
        "'the MLP is not SwiGLU: activation ?, gated ?' depends on gated_linear_unit; give --gated-linear-unit"
    ]


def test_it_asks_megatron_for_the_fused_activation():
    assert overrides("swiglu") == {"bias_activation_fusion": True}
