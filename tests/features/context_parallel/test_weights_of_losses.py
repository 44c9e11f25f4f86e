"""Every loss that Megatron scales by itself weighs what is configured, however many ranks share a sequence."""

from itertools import product
from typing import Any

import pytest

from tests.conftest import Prove
from tests.features.parity import TENSOR

EXPERTS = {"num_experts": 4}
BALANCE = {"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.1}
LOSSES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "balance and z": (EXPERTS, BALANCE),
    "balance of sequences": (EXPERTS, BALANCE | {"moe_router_load_balancing_type": "seq_aux_loss"}),
    "balance of a step": (EXPERTS, BALANCE | {"moe_router_load_balancing_type": "global_aux_loss"}),
    "biases of experts": (
        EXPERTS,
        {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid", "moe_aux_loss_coeff": 0.0},
    ),
    "further tokens": ({"mtp_num_layers": 2, **EXPERTS}, BALANCE | {"mtp_loss_scaling_factor": 0.3}),
}
LAYOUTS: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "cp2": ("ring-attention", (), {"cp": 2}),
    "cp4": ("ring-attention", (), {"cp": 4}),
    "cp2 by heads": ("ulysses-attention", (), {"cp": 2}),
    "cp2 x tp2": ("ring-attention", TENSOR, {"cp": 2, "tp": 2}),
    "cp2 x dp2": ("ring-attention", (), {"cp": 2}),
    "cp2 x ep2": ("ring-attention", ("expert-parallel",), {"cp": 2, "ep": 2}),
    "cp2 x pp2": ("ring-attention", ("pipeline-parallel",), {"cp": 2, "pp": 2}),
}
NOT_ALIKE = {("cp2 by heads", "further tokens"), ("cp2 x dp2", "balance of a step")}
"""Further tokens need Megatron's zig-zag; a step's balance is over what replicas run at the same time, and weighs 1 / dp."""
RANKS = {"cp2": 2, "cp2 by heads": 2, "cp2 x ep2": 2}


def problems(prove: Prove, layout: str, loss: str, per_token: bool, steps: int = 2, **small: int) -> list[str]:
    feature, more, sizes = LAYOUTS[layout]
    world, options = LOSSES[loss]
    options = options | {"calculate_per_token_loss": per_token}
    verdict = prove(feature, *more, world=world | sizes | small, nproc=RANKS.get(layout, 4), options=options, steps=steps)
    return [str(problem) for problem in verdict.problems]


@pytest.mark.long
def test_losses_of_routers_and_further_tokens_weigh_what_is_configured(prove: Prove) -> None:
    assert problems(prove, "cp2", "further tokens", per_token=False, steps=1, num_layers=1, mtp_num_layers=1) == []


@pytest.mark.cover
@pytest.mark.long
@pytest.mark.parametrize("per_token", [False, True], ids=["a micro-batch", "a token"])
@pytest.mark.parametrize(("layout", "loss"), [pair for pair in product(LAYOUTS, LOSSES) if pair not in NOT_ALIKE])
def test_every_loss_weighs_what_is_configured_in_every_layout(prove: Prove, layout: str, loss: str, per_token: bool) -> None:
    assert problems(prove, layout, loss, per_token) == []


@pytest.mark.long
@pytest.mark.parametrize("loss", ["balance and z", "balance of sequences"])
def test_losses_of_routers_weigh_as_much_beside_sequence_parallelism_with_a_loss_per_token(prove: Prove, loss: str) -> None:
    world, options = LOSSES[loss]
    options = options | {"calculate_per_token_loss": True}
    assert prove(*TENSOR, world=world | {"tp": 2}, nproc=2, options=options).problems == []
