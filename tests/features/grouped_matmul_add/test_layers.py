from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import silu

from mindspeed.features.grouped_matmul_add.feature import GroupedMatmulAdd
from mindspeed.features.grouped_matmul_add.layers import AccumulatingExperts, activation, misfits, product
from mindspeed.plugins import FeatureArgs, MindSpeedError, World

ENDS = torch.tensor([3, 3, 8])


def experts_weight(dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    """Three experts, 4 to 6, in the shape that Megatron gives their parameter."""
    return torch.nn.Parameter(torch.randn(3 * 4, 6).to(dtype))


def one_by_one(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    matrices = weight.view(3, 4, 6)
    return torch.cat([x[start:end] @ matrices[e] for e, (start, end) in enumerate([(0, 3), (3, 3), (3, 8)])])


def test_rows_are_multiplied_by_the_matrix_of_their_expert_and_an_idle_expert_gets_a_gradient_of_zero() -> None:
    x, weight = torch.randn(8, 4, requires_grad=True), experts_weight()
    y, expected = product(x, weight, ENDS), one_by_one(x, weight)
    torch.testing.assert_close(y, expected)
    ours, theirs = (torch.autograd.grad(result.square().sum(), (x, weight)) for result in (y, expected))
    torch.testing.assert_close(ours, theirs)
    assert not ours[1].view(3, 4, 6)[1].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_is_added_to_what_the_buffer_has_and_megatrons_hook_is_told(dtype: torch.dtype) -> None:
    x, weight = torch.randn(8, 4).to(dtype), experts_weight(dtype)
    weight.main_grad, weight.grad_added_to_main_grad = torch.ones(12, 6), False  # type: ignore[attr-defined]
    wide = weight.detach().double().requires_grad_()
    product(x, weight, ENDS).sum().backward()
    (expected,) = torch.autograd.grad(one_by_one(x.double(), wide).sum(), wide)
    assert weight.grad_added_to_main_grad is True  # type: ignore[attr-defined]
    torch.testing.assert_close(weight.main_grad.double(), 1 + expected, rtol=1e-5, atol=1e-5)  # type: ignore[attr-defined]


@pytest.mark.parametrize("buffer", [torch.bfloat16, None], ids=["a buffer that is not fp32", "no hook that asks"])
def test_without_a_wide_buffer_or_a_hook_the_gradient_goes_the_usual_way(buffer: torch.dtype | None) -> None:
    weight = experts_weight(torch.bfloat16)
    weight.main_grad = torch.zeros(12, 6, dtype=buffer or torch.float32)  # type: ignore[attr-defined]
    if buffer is not None:
        weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    product(torch.randn(8, 4).bfloat16(), weight, ENDS).sum().backward()
    assert weight.grad is not None
    assert bool(weight.grad.any())
    assert not weight.main_grad.any()  # type: ignore[attr-defined]


class Experts(AccumulatingExperts, torch.nn.Module):
    """What Megatron's grouped experts give to the forward pass."""

    is_megatrons = False

    def __init__(self, **config: Any) -> None:
        torch.nn.Module.__init__(self)
        defaults = {"moe_apply_probs_on_input": False, "gated_linear_unit": False, "activation_func": torch.tanh}
        self.config, self.activation_recompute = SimpleNamespace(**defaults | config), False
        self.weight1, self.weight2 = experts_weight(), torch.nn.Parameter(torch.randn(3 * 6, 4))


@pytest.mark.parametrize("rows", [8, 0])
def test_experts_weigh_their_activation_or_their_input(rows: int) -> None:
    x, probs, counts = torch.randn(rows, 4), torch.rand(rows), torch.tensor([3, 0, rows - 3] if rows else [0, 0, 0])
    experts = Experts()
    y, bias = experts(x, counts, probs)
    assert (y.shape, bias) == ((rows, 4), None)
    y.sum().backward()
    assert all(weight.grad is not None for weight in experts.parameters())
    if rows:
        h = torch.tanh(one_by_one(x, experts.weight1)) * probs[:, None]
        matrices = experts.weight2.view(3, 6, 4)
        torch.testing.assert_close(y, torch.cat([h[:3] @ matrices[0], h[3:] @ matrices[2]]))
        weighed = Experts(moe_apply_probs_on_input=True)
        weighed.load_state_dict(experts.state_dict())
        torch.testing.assert_close(weighed(x, counts, probs)[0], experts(x * probs[:, None], counts, torch.ones(rows))[0])


@pytest.mark.parametrize("fused", [False, True], ids=["as it is", "by Megatron's fused function"])
def test_a_gated_activation_has_gate_and_value_side_by_side(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.fusions import fused_bias_swiglu

    called = []
    monkeypatch.setattr(
        fused_bias_swiglu, "weighted_bias_swiglu_impl", lambda h, bias, probs: called.append(bias) or swiglu(h) * probs
    )

    def swiglu(h: torch.Tensor) -> torch.Tensor:
        return silu(h[:, :3]) * h[:, 3:]

    h, probs = torch.randn(5, 6), torch.rand(5, 1)
    config = SimpleNamespace(gated_linear_unit=True, activation_func=silu, bias_activation_fusion=fused)
    torch.testing.assert_close(activation(config, h, probs), swiglu(h) * probs)
    assert called == ([None] if fused else [])


def config(**values: Any) -> SimpleNamespace:
    defaults = {"add_bias_linear": False, "moe_latent_size": None, "moe_apply_probs_on_input": False, "moe_router_topk": 2}
    return SimpleNamespace(**defaults | values)


def test_what_grouped_experts_cannot_have_is_found_all_at_once() -> None:
    assert misfits(config()) == []
    assert misfits(config(moe_apply_probs_on_input=True, moe_router_topk=1)) == []
    clamped = {"activation_func_clamp_value": 7.0, "glu_linear_offset": 1.0}
    assert misfits(config(add_bias_linear=True, moe_latent_size=8, moe_apply_probs_on_input=True, **clamped)) == [
        "add_bias_linear is set",
        "activation_func_clamp_value is set",
        "glu_linear_offset is set",
        "moe_latent_size is set",
        "moe_apply_probs_on_input is set and moe_router_topk is not 1",
    ]


def test_a_dense_configuration_beside_the_experts_is_not_judged() -> None:
    feature = GroupedMatmulAdd(FeatureArgs(), World({}))
    feature.config_ready(config(add_bias_linear=True, num_moe_experts=None))
    with pytest.raises(MindSpeedError) as error:
        feature.config_ready(config(add_bias_linear=True, num_moe_experts=4))
    assert str(error.value) == (
        "MS304 grouped-matmul-add: add_bias_linear is set in a model that is being built\n  fix: remove grouped-matmul-add"
    )
