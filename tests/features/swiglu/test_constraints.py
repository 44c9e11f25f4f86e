from dataclasses import replace

import pytest

from mindspeed.engine.resolution.environment import made_up
from mindspeed.megatron_lm.training_plan import plan_training
from tests.features.resolving import active, not_checked, overrides, refusals


@pytest.mark.parametrize(("activation", "gated"), [("gelu", True), ("silu", False)])
def test_another_activation_is_refused(activation, gated):
    assert refusals("swiglu", world_size=1, activation=activation, gated_linear_unit=gated) == [
        f"MS304 swiglu: the MLP is not SwiGLU: activation={activation}, gated_linear_unit={gated} "
        "| --activation silu --gated-linear-unit, or remove swiglu"
    ]


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("clamped_activation", "the input of the activation function is clamped, which the operator does not compute"),
        ("shifted_gate", "an offset is added to the linear part (glu_linear_offset), which the operator does not compute"),
        ("low_precision_activation_input", "the input of the activation function is kept in fp8, which the operator ignores"),
        ("transformer_engine_activation", "the activation function is Transformer Engine's (use_te_activation_func)"),
        ("cpu_offloading", "Megatron offloads activations to host memory, which swiglu does not support"),
    ],
)
def test_options_that_the_operator_would_ignore_are_refused(field, text):
    option = "--no-" + field.replace("_", "-")
    assert refusals("swiglu", world_size=1, **{field: True}) == [f"MS304 swiglu: {text} | {option}, or remove swiglu"]


def test_a_gated_silu_is_accepted():
    assert refusals("swiglu", world_size=1) == []


def test_level_one_switches_it_on_where_it_has_a_variant_and_the_mlp_is_swiglu():
    everywhere = {"has_variant": lambda op, platform: True}
    assert "swiglu" in active(world_size=1, **everywhere)
    assert "swiglu" not in active(world_size=1, activation="gelu", **everywhere)
    assert "swiglu" not in active(world_size=1)


def test_an_unknown_activation_is_not_checked():
    assert not_checked("swiglu") == [
        "'the MLP is not SwiGLU: activation=?, gated_linear_unit=?' depends on gated_linear_unit; give --gated-linear-unit"
    ]


def test_it_asks_megatron_for_the_fused_activation():
    assert overrides("swiglu") == {"bias_activation_fusion": True}


def test_megatrons_own_flag_takes_it_out():
    environment = replace(made_up("cpu", "0.16.1"), world_size=1)
    shape = "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1 --swiglu"
    for flags, expected in (("", True), (" --no-bias-swiglu-fusion", False)):
        _, plan = plan_training(f"{shape}{flags}".split(), {}, environment)
        assert ("swiglu" in plan.names) is expected
    (row,) = [row for row in plan.rows if row.feature == "swiglu"]
    assert (row.kind, row.text) == ("left-out", "removed by Megatron's --no-bias-swiglu-fusion")
