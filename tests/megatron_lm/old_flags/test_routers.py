"""The routers of MindSpeed-LLM: by the arguments that they become, Megatron gives experts the weights of the original."""

import pytest
import torch

from mindspeed.compat.old_flags.flags import read_old_flags
from mindspeed.megatron_lm.given_arguments import surface_or_nearest
from mindspeed.registry import catalog

KNOWN = frozenset(surface_or_nearest("0.16.1").by_option)
SELECTED, FACTOR = 4, 2.5


def of_one_softmax(logits: torch.Tensor, normed: bool, factor: float) -> torch.Tensor:
    """Return the weights [tokens, experts] of the experts that have the highest probabilities of all, else 0."""
    probabilities = logits.softmax(-1)
    weights, experts = probabilities.topk(SELECTED)
    if normed:
        weights = weights / weights.sum(-1, keepdim=True)
    return torch.zeros_like(logits).scatter(1, experts, weights * factor)


@pytest.mark.parametrize("kind", ["softmax_topk", "group_limited_greedy"])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("factor", [1.0, FACTOR])
def test_the_weights_of_experts_are_those_of_the_original(kind: str, normed: bool, factor: float) -> None:
    moe_utils = pytest.importorskip("megatron.core.transformer.moe.moe_utils")
    line = f"--moe-router-load-balancing-type {kind} --moe-router-topk-scaling-factor {factor}" + " --norm-topk-prob" * normed
    words = read_old_flags(line.split(), KNOWN, catalog()).rest
    scaled = "--moe-router-topk-scaling-factor" in words
    logits = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
    weights, _ = moe_utils.topk_routing_with_score_function(
        logits,
        SELECTED,
        use_pre_softmax="--moe-router-pre-softmax" in words,
        scaling_factor=factor if scaled else None,
        score_function="softmax",
    )
    ignored = kind == "group_limited_greedy" and normed
    expected = of_one_softmax(logits, normed, 1.0 if ignored else factor)
    torch.testing.assert_close(weights, expected)
