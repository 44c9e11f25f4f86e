"""The gate against a loop over tokens that knows nothing of sorting, masks or groups."""

import math
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from mindspeed.features.deepspeed_moe.gating import Choices, Routing, admit, balanced, choose
from mindspeed.moe.capacity import capacity_of

EPSILON = torch.finfo(torch.float32).eps


@dataclass
class Loop:
    """What each token got: ``kept[token]`` is a list of (expert, place), ``weights[token]`` their weights."""

    kept: list[dict[int, int]] = field(default_factory=list)
    weights: list[dict[int, float]] = field(default_factory=list)
    loss: float = 0.0


def by_token(logits_TE: Tensor, topk: int, capacity: int, draws: list[float] | None = None) -> Loop:
    """One group, one token after the other, in double precision but for the probabilities that decide."""
    p = logits_TE.float().softmax(-1).tolist()
    tokens, experts = len(p), len(p[0])
    chosen = [sorted(range(experts), key=lambda e: (-row[e], e))[:topk] for row in p]
    kept: list[dict[int, int]] = [{} for _ in range(tokens)]
    if topk > 2 or draws is not None:
        for expert in range(experts):
            queue = [t for t in range(tokens) if expert in chosen[t]]
            best = sorted(queue, key=lambda t: (-(draws[t] if draws else p[t][expert]), t))[:capacity]
            for place, token in enumerate(sorted(best)):
                kept[token][expert] = place
    else:
        waiting = [0] * experts
        for choice in range(topk):
            for token in range(tokens):
                expert = chosen[token][choice]
                if waiting[expert] < capacity:
                    kept[token][expert] = waiting[expert]
                waiting[expert] += 1
    loop = Loop(kept)
    for token in range(tokens):
        weights = {expert: p[token][expert] for expert in kept[token]}
        total = max(sum(weights.values()), EPSILON) if topk > 1 else 1.0
        loop.weights.append({expert: weight / total for expert, weight in weights.items()})
    for expert in range(experts):
        mean = sum(row[expert] for row in p) / tokens
        loop.loss += experts * mean * sum(experts_of[0] == expert for experts_of in chosen) / tokens
    return loop


def kept_of(routing: Routing, group: int) -> list[dict[int, int]]:
    expert, slot = routing.expert[group].tolist(), routing.slot[group].tolist()
    return [
        {e: s for e, s in zip(experts, slots, strict=True) if s < routing.capacity}
        for experts, slots in zip(expert, slot, strict=True)
    ]


def weights_of(routing: Routing, group: int) -> list[dict[int, float]]:
    expert, slot, weight = (x[group].tolist() for x in (routing.expert, routing.slot, routing.weight))
    return [
        {e: w for e, s, w in zip(*row, strict=True) if s < routing.capacity} for row in zip(expert, slot, weight, strict=True)
    ]


def logits(groups: int, tokens: int, experts: int, skew: str, seed: int = 0) -> Tensor:
    """Random logits; an expert that nobody likes, or one that everybody likes."""
    drawn = torch.randn(groups, tokens, experts, generator=torch.Generator().manual_seed(seed))
    if skew == "empty":
        drawn[..., 1] -= 30
    if skew == "overfull":
        drawn[..., 2] += 30
    if skew == "ties":
        drawn = drawn.mul(1.5).round()
    return drawn


@pytest.mark.parametrize("skew", ["random", "empty", "overfull", "ties"])
@pytest.mark.parametrize("factor", [0.5, 1.0, 1.25, 2.0, 8.0])
@pytest.mark.parametrize("topk", [1, 2, 4])
def test_kept_choices_weights_and_loss_are_those_of_a_loop_over_tokens(topk: int, factor: float, skew: str) -> None:
    drawn = logits(3, 26, 8, skew)
    choices = choose(drawn, topk)
    routing = admit(choices, capacity_of(26, 8, topk, factor, 1))
    loops = [by_token(group, topk, routing.capacity) for group in drawn]
    for group, loop in enumerate(loops):
        assert kept_of(routing, group) == loop.kept
        for mine, theirs in zip(weights_of(routing, group), loop.weights, strict=True):
            assert mine == pytest.approx(theirs, abs=1e-6)
    assert float(choices.balance_loss()) == pytest.approx(sum(loop.loss for loop in loops) / 3, abs=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_places_by_lot_go_to_the_highest_draws_in_token_order(seed: int) -> None:
    drawn = logits(1, 40, 4, "overfull" if seed == 2 else "random", seed)
    draws = torch.rand(1, 40, generator=torch.Generator().manual_seed(seed))
    routing = admit(choose(drawn, 1, draws_GT=draws), 6)
    assert kept_of(routing, 0) == by_token(drawn[0], 1, 6, draws[0].tolist()).kept


def test_second_choices_queue_behind_first_ones_that_were_dropped() -> None:
    first = torch.tensor([[3.0, 2.0, 0.0], [3.0, 0.0, 2.0], [2.0, 3.0, 0.0]])[None]
    routing = admit(choose(first, 2), 2)
    assert kept_of(routing, 0) == [{0: 0, 1: 1}, {0: 1, 2: 0}, {1: 0}]
    assert routing.kept().tolist() == [[True, True, False], [True, False, True], [False, True, False]]
    assert float(routing.weight[0, 2].sum()) == pytest.approx(1.0)


def test_what_a_group_keeps_does_not_depend_on_the_groups_beside_it() -> None:
    drawn = logits(4, 12, 4, "random")
    together = admit(choose(drawn, 2), 4)
    for group in range(4):
        alone = admit(choose(drawn[group : group + 1], 2), 4)
        assert torch.equal(alone.slot[0], together.slot[group])
        assert torch.equal(alone.weight[0], together.weight[group])


def test_gumbel_noise_decides_and_does_not_weigh() -> None:
    drawn = logits(1, 20, 4, "random")
    noise = -torch.empty(1, 20, 4).exponential_(generator=torch.Generator().manual_seed(1)).log()
    choices = choose(drawn, 1, gumbel_GTE=noise)
    assert torch.equal(choices.expert[..., 0], (drawn + noise).argmax(-1))
    assert not torch.equal(choices.expert[..., 0], drawn.argmax(-1))
    torch.testing.assert_close(choices.probability, drawn.softmax(-1).gather(-1, choices.expert))


def test_sinkhorn_balances_the_choices_and_leaves_the_weights() -> None:
    drawn = logits(1, 64, 4, "random") + torch.tensor([2.0, 0.0, 0.0, 0.0])
    shares = balanced(drawn).exp().sum(1)
    torch.testing.assert_close(shares, torch.full((1, 4), 16.0), rtol=1e-3, atol=1e-3)
    choices = choose(drawn, 1, sinkhorn=True)
    assert int(choices.need()) < int(choose(drawn, 1).need())
    torch.testing.assert_close(choices.probability, drawn.softmax(-1).gather(-1, choices.expert))


def test_the_need_is_the_capacity_that_drops_nothing() -> None:
    choices = choose(logits(2, 30, 4, "overfull"), 2)
    need = int(choices.need())
    assert bool((admit(choices, need).slot < need).all())
    assert not bool((admit(choices, need - 1).slot < need - 1).all())


def test_gradients_are_those_of_the_formula() -> None:
    drawn = logits(2, 10, 4, "random").double().requires_grad_()

    def outcome(x: Tensor) -> tuple[Tensor, ...]:
        choices = choose(x, 2)
        return admit(choices, 3).weight, choices.balance_loss(), choices.z_loss()

    assert torch.autograd.gradcheck(outcome, (drawn,))


@pytest.mark.parametrize(
    ("tokens", "experts", "topk", "factor", "minimum", "expected"),
    [(24, 4, 2, 1.0, 4, 12), (10, 4, 1, 1.0, 4, 4), (20, 2, 1, 1.1, 0, 11), (8, 4, 2, 8.0, 4, 8), (100, 8, 1, 0.5, 0, 7)],
)
def test_capacity(tokens: int, experts: int, topk: int, factor: float, minimum: int, expected: int) -> None:
    assert capacity_of(tokens, experts, topk, factor, minimum) == expected
    assert expected == min(max(math.ceil(round(tokens / experts * factor * topk, 9)), minimum), tokens)


def test_rows_stand_by_expert_group_and_place() -> None:
    routing = admit(choose(logits(2, 6, 4, "random"), 1), 2)
    rows = routing.row()
    for group, token in [(g, t) for g in range(2) for t in range(6)]:
        expert, slot = int(routing.expert[group, token, 0]), int(routing.slot[group, token, 0])
        expected = (expert * 2 + group) * 2 + slot if slot < 2 else routing.rows
        assert int(rows[group, token, 0]) == expected


def test_a_token_that_lost_every_place_has_no_weight_and_finite_gradients() -> None:
    drawn = torch.zeros(1, 5, 3, requires_grad=True)
    routing = admit(choose(drawn, 2), 1)
    assert routing.weight[0, 4].tolist() == [0.0, 0.0]
    routing.weight.sum().backward()
    assert drawn.grad is not None
    assert bool(drawn.grad.isfinite().all())


def test_choices_name_their_number() -> None:
    choices: Choices = choose(logits(1, 4, 3, "random"), 2)
    assert (choices.topk, choices.experts) == (2, 3)
