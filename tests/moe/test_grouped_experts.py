from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import silu

from mindspeed.moe.dispatchers import AllGatherDispatch, AllToAllDispatch
from mindspeed.moe.grouped_experts import GroupedExperts, activation, refuse_other_experts
from mindspeed.plugins import MindSpeedError
from tests.moe.test_products import experts_weight, one_by_one


class Experts(GroupedExperts):
    """Experts without Megatron's groups and initialization."""

    def __init__(self, **config: Any) -> None:
        torch.nn.Module.__init__(self)
        defaults = {
            "hidden_size": 4,
            "moe_apply_probs_on_input": False,
            "gated_linear_unit": False,
            "activation_func": torch.tanh,
        }
        self.config, self.activation_recompute = SimpleNamespace(**defaults | config), False
        self.num_local_experts = 3
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


GATED = {"gated_linear_unit": True, "activation_func": silu, "bias_activation_fusion": False}


@pytest.mark.parametrize("input_weighed", [False, True])
@pytest.mark.parametrize("config", [{}, GATED])
def test_experts_without_probabilities_are_those_with_ones(config: dict[str, Any], input_weighed: bool) -> None:
    experts = Experts(moe_apply_probs_on_input=input_weighed, **config)
    if config:
        experts.weight2 = torch.nn.Parameter(torch.randn(3 * 3, 4))
    x, counts = torch.randn(8, 4, requires_grad=True), torch.tensor([3, 0, 5])
    (without, _), (weighed, _) = (experts(x, counts, probs) for probs in (None, torch.ones(8)))
    torch.testing.assert_close(without, weighed)
    inputs = (x, *experts.parameters())
    for ours, theirs in zip(*(torch.autograd.grad(y.square().sum(), inputs) for y in (without, weighed)), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("fused", [False, True], ids=["as it is", "by Megatron's fused function"])
def test_a_gated_activation_has_gate_and_value_side_by_side(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.fusions import fused_bias_swiglu

    called = []

    def weighted(h: torch.Tensor, bias: torch.Tensor | None, probs: torch.Tensor) -> torch.Tensor:
        called.append(bias)
        return swiglu(h) * probs

    monkeypatch.setattr(fused_bias_swiglu, "weighted_bias_swiglu_impl", weighted)
    monkeypatch.setattr(fused_bias_swiglu, "bias_swiglu_impl", lambda h, bias: weighted(h, bias, torch.ones(1)))

    def swiglu(h: torch.Tensor) -> torch.Tensor:
        return silu(h[:, :3]) * h[:, 3:]

    h, probs = torch.randn(5, 6), torch.rand(5, 1)
    config = SimpleNamespace(gated_linear_unit=True, activation_func=silu, bias_activation_fusion=fused)
    torch.testing.assert_close(activation(config, h, probs), swiglu(h) * probs)
    torch.testing.assert_close(activation(config, h), swiglu(h))
    assert called == ([None, None] if fused else [])


def test_flattened_shards_of_an_optimizer_are_refused() -> None:
    from mindspeed.moe.grouped_experts import _build

    with pytest.raises(MindSpeedError) as error:
        _build(
            None, (), True, False, "optimizer.state.exp_avg.experts.linear_fc1.weight", torch.zeros(2), (0, 0, 0), slice(0, 2)
        )
    assert str(error.value) == (
        "MS641 the optimizer state of optimizer.state.exp_avg.experts.linear_fc1.weight would be saved as a range of a "
        "flattened tensor, a format that Megatron no longer reads\n"
        "  fix: in the metadata for sharded_state_dict, set distrib_optim_sharding_type to dp_reshardable or "
        "fully_reshardable instead of fully_sharded_model_space"
    )


def test_a_state_of_other_experts_is_refused() -> None:
    experts = Experts()
    experts.register_load_state_dict_pre_hook(refuse_other_experts)
    layer = torch.nn.ModuleDict({"experts": experts})
    state = layer.state_dict()
    layer.load_state_dict(state)
    wrong = {
        "experts.weight2": torch.zeros(12, 4),
        "experts.local_experts.0.linear_fc1.weight": torch.zeros(6, 4),
    }
    texts = []
    for name, weight in wrong.items():
        with pytest.raises(MindSpeedError) as error:
            layer.load_state_dict({**state, name: weight})
        texts.append(str(error.value))
    assert texts == [
        (
            "MS642 the experts of the loaded state do not fit experts: weight2 is (18, 4), but (12, 4) in the loaded state\n"
            "  fix: load the state into a model with the same number and size of experts on the same number of ranks, or use "
            "a distributed checkpoint"
        ),
        (
            "MS642 the experts of the loaded state do not fit experts: the layer has one tensor for all local "
            "experts, but the loaded state has one tensor for each expert\n"
            "  fix: save the state with --ckpt-format torch_dist, which both kinds of layers can load, or remove "
            "--moe-grouped-gemm"
        ),
    ]


@pytest.mark.parametrize(
    ("routing_map", "probs", "given"),
    [
        (torch.ones(6, 3, dtype=torch.bool), torch.ones(6, 4), "torch.bool (6, 3) and probabilities (6, 4)"),
        (torch.ones(5, 4, dtype=torch.bool), torch.ones(5, 4), "torch.bool (5, 4) and probabilities (5, 4)"),
        (
            torch.ones(6, 4, dtype=torch.int64),
            torch.ones(6, 4),
            "torch.int64 (6, 4) and probabilities (6, 4)",
        ),
    ],
    ids=["experts", "tokens", "type"],
)
@pytest.mark.parametrize("dispatch", [AllToAllDispatch, AllGatherDispatch])
def test_routing_of_another_shape_is_refused(dispatch: Any, routing_map: Any, probs: Any, given: str) -> None:
    dispatcher = dispatch()
    dispatcher.config = SimpleNamespace(num_moe_experts=4)
    with pytest.raises(MindSpeedError) as error:
        dispatcher.dispatch_preprocess(torch.zeros(3, 2, 8), routing_map, probs)
    assert str(error.value) == (
        f"MS640 a router returned a routing map of {given}, but both must have the shape (tokens, experts) = (6, 4), and the "
        "map must be boolean\n"
        "  fix: make the router return one boolean and one probability per token and expert"
    )
