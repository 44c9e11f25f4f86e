from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import silu

from mindspeed.moe.grouped_experts import GroupedExperts, activation
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


@pytest.mark.parametrize("fused", [False, True], ids=["as it is", "by Megatron's fused function"])
def test_a_gated_activation_has_gate_and_value_side_by_side(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.fusions import fused_bias_swiglu

    called = []

    def weighted(h: torch.Tensor, bias: torch.Tensor | None, probs: torch.Tensor) -> torch.Tensor:
        called.append(bias)
        return swiglu(h) * probs

    monkeypatch.setattr(fused_bias_swiglu, "weighted_bias_swiglu_impl", weighted)

    def swiglu(h: torch.Tensor) -> torch.Tensor:
        return silu(h[:, :3]) * h[:, 3:]

    h, probs = torch.randn(5, 6), torch.rand(5, 1)
    config = SimpleNamespace(gated_linear_unit=True, activation_func=silu, bias_activation_fusion=fused)
    torch.testing.assert_close(activation(config, h, probs), swiglu(h) * probs)
    assert called == ([None] if fused else [])


def test_flattened_shards_of_an_optimizer_are_refused() -> None:
    from mindspeed.moe.expert_checkpoint import _build

    with pytest.raises(MindSpeedError) as error:
        _build(
            None, (), True, False, "optimizer.state.exp_avg.experts.linear_fc1.weight", torch.zeros(2), (0, 0, 0), slice(0, 2)
        )
    assert str(error.value) == (
        "MS641 the optimizer's state of optimizer.state.exp_avg.experts.linear_fc1.weight is to be saved as a range of a "
        "flattened tensor, which Megatron no longer reads\n  fix: save with distrib_optim_sharding_type dp_reshardable or "
        "fully_reshardable instead of fully_sharded_model_space"
    )
