from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.functional as F
from megatron.core.fusions import fused_bias_swiglu
from megatron.core.transformer.transformer_config import TransformerConfig

from mindspeed.features.swiglu.layers import bias_swiglu, check_config, weighted_bias_swiglu
from mindspeed.plugins import MindSpeedError


def with_gradients(function, *tensors):
    leaves = [tensor.clone().requires_grad_() if tensor is not None else None for tensor in tensors]
    y = function(*leaves)
    y.backward(torch.linspace(-1, 1, y.numel()).view_as(y).to(y.dtype))
    return [y, *(leaf.grad for leaf in leaves if leaf is not None)]


@pytest.mark.parametrize(
    ("ours", "megatrons"),
    [
        (bias_swiglu, fused_bias_swiglu.bias_swiglu_impl),
        (weighted_bias_swiglu, fused_bias_swiglu.weighted_bias_swiglu_impl),
    ],
)
def test_stand_ins_take_what_megatrons_functions_take(ours, megatrons):
    parameters = [[(p.name, p.default) for p in inspect.signature(f).parameters.values()] for f in (ours, megatrons)]
    assert parameters[0] == parameters[1]


@pytest.mark.parametrize("bias", [None, torch.randn(12)])
@pytest.mark.parametrize("shape", [(5, 12), (3, 2, 12)])
def test_it_is_megatrons_activation_with_and_without_bias(shape, bias):
    x = torch.randn(shape)
    theirs = with_gradients(fused_bias_swiglu.bias_swiglu_impl, x, bias)
    for ours, reference in zip(with_gradients(bias_swiglu, x, bias), theirs, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("tokens", [5, 0])
def test_it_is_megatrons_expert_activation_with_wide_weights(tokens, dtype, tolerance):
    x, weights = torch.randn(tokens, 12).to(dtype), torch.rand(tokens, 1)
    ours = with_gradients(lambda x, weights: weighted_bias_swiglu(x, None, weights), x, weights)
    theirs = with_gradients(lambda x, weights: fused_bias_swiglu.weighted_bias_swiglu_impl(x, None, weights), x, weights)
    assert [tensor.dtype for tensor in ours] == [tensor.dtype for tensor in theirs] == [dtype, dtype, torch.float32]
    for value, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(value, reference, rtol=tolerance, atol=tolerance)


def test_an_expert_may_have_a_bias():
    x, bias, weights = torch.randn(4, 12), torch.randn(12), torch.rand(4, 1)
    torch.testing.assert_close(weighted_bias_swiglu(x, bias, weights), bias_swiglu(x + bias, None) * weights)


def config(**values):
    defaults = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2}
    return TransformerConfig(**defaults | values)


def test_a_swiglu_model_is_accepted():
    check_config(config(activation_func=F.silu, gated_linear_unit=True, bias_activation_fusion=True))


def test_every_option_that_would_be_ignored_is_refused():
    with pytest.raises(MindSpeedError) as error:
        check_config(config(activation_func=F.gelu, activation_func_clamp_value=7.0))
    assert str(error.value) == "\n".join(
        f"MS304 swiglu: {what} in the model that is being built\n  fix: take out swiglu"
        for what in ("activation_func is not silu", "gated_linear_unit is off", "activation_func_clamp_value is set")
    )
