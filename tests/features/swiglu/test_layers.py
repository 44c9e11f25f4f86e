import inspect

import pytest
import torch
import torch.nn.functional as F
from megatron.core.fusions import fused_bias_swiglu
from megatron.core.transformer.transformer_config import TransformerConfig

from mindspeed.features.swiglu.layers import fits, with_operator, with_weighted_operator


@pytest.fixture(autouse=True)
def uncompiled():
    """Megatron's own functions as they are written: compiling them takes longer than all tests here."""
    with torch.compiler.set_stance("force_eager"):
        yield


bias_swiglu = with_operator(fused_bias_swiglu.bias_swiglu_impl)
weighted_bias_swiglu = with_weighted_operator(fused_bias_swiglu.weighted_bias_swiglu_impl)


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
    signature = inspect.signature(ours, follow_wrapped=False)
    names = list(inspect.signature(megatrons).parameters)
    signature.bind(*names)
    signature.bind(**dict.fromkeys(names))
    with pytest.raises(TypeError):
        signature.bind(*names[:1])


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


def test_the_fused_activation_is_set_for_what_the_operator_computes_alone():
    swiglu = {"activation_func": F.silu, "gated_linear_unit": True}
    assert fits(config(**swiglu, bias_activation_fusion=True))
    assert not fits(config(**swiglu, activation_func_clamp_value=7.0))
    assert not fits(config(activation_func=F.gelu, gated_linear_unit=True))
    assert not fits(config(activation_func=F.tanh, gated_linear_unit=True))


def test_an_input_that_is_kept_in_fp8_or_on_the_host_stays_megatrons():
    calls = []
    ours = with_operator(lambda *given: calls.append(given) or given[0])
    x = torch.randn(3, 12)
    assert ours(x, None, True) is x
    assert ours(x, None, False, True) is x
    weighted = with_weighted_operator(lambda *given: calls.append(given) or given[0])
    assert weighted(x, None, torch.ones(3, 1), True) is x
    assert [given[2:] for given in calls[:2]] == [(True,), (False, True)]


@pytest.mark.parametrize(
    ("wrapped", "given"),
    [(with_operator, (None,)), (with_weighted_operator, (None, torch.ones(2, 1)))],
    ids=["dense", "expert"],
)
def test_an_option_that_a_newer_megatron_adds_is_taken_and_is_megatrons_own_when_it_is_set(wrapped, given):
    def original(input, *options, **named):
        return "megatron", options[len(given) :], named

    function = wrapped(original)
    assert function(torch.ones(2, 4), *given, False, False, None).shape == (2, 2)
    assert function(torch.ones(2, 4), *given, clamp_value=None).shape == (2, 2)
    assert function(torch.ones(2, 4), *given, False, False, 0.0) == ("megatron", (False, False, 0.0), {})
    assert function(torch.ones(2, 4), *given, clamp_value=7.0) == ("megatron", (), {"clamp_value": 7.0})
