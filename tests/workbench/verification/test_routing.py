"""Two runs whose scores tie choose the same experts, and weigh them by their own scores."""

from typing import Any

import torch
from torch import Tensor, nn

from mindspeed.workbench.verification.record import RoutingChoice
from mindspeed.workbench.verification.routing import RoutingRecord, merge

ROWS = 4


class Router(nn.Module):
    layer_number = 1

    def routing(self, logits_SBE: Tensor) -> tuple[Tensor, Tensor]:
        """Scores and numbers of two experts of each token, in two groups of which the better one is taken."""
        logits = logits_SBE.reshape(-1, logits_SBE.shape[-1])
        group = logits.view(len(logits), 2, -1).topk(1, dim=-1)[0].sum(-1).topk(1, dim=-1).indices
        mask = torch.arange(2).repeat_interleave(logits.shape[1] // 2) != group
        scores, experts = torch.topk(logits.masked_fill(mask, -torch.inf), k=2, dim=1)
        torch.topk(logits, k=2, dim=0)  # as a capacity chooses tokens
        return scores, experts


def watched(replayed: Any, rows: range, places: list[tuple[int, int]]) -> tuple[Router, list[RoutingChoice]]:
    router, made = Router(), list[RoutingChoice]()
    chunk = nn.Module()
    chunk.mlp = nn.Module()
    chunk.mlp.router = router

    def where(length: int) -> tuple[int, int, range]:
        assert length == len(rows)
        return *places.pop(0), rows

    RoutingRecord(replayed, where, made).watch([chunk])
    return router, made


def test_choices_are_repeated_by_ranks_that_have_some_of_the_tokens_each() -> None:
    first, other = torch.randn(ROWS, 1, 8), torch.randn(ROWS, 1, 8)
    router, made = watched({}, range(ROWS), [(0, 3)])
    expected = router.routing(first)[1]
    whole = merge(made, ROWS)
    for rows in (range(2), range(2, 4)):
        again, more = watched(whole, rows, [(0, 3)])
        scores, experts = again.routing(other[rows.start : rows.stop])
        assert torch.equal(experts, expected[rows.start : rows.stop])
        assert torch.equal(scores, other[rows.start : rows.stop].flatten(0, 1).gather(1, experts))
        assert more == []


def test_recomputation_in_backward_belongs_to_the_micro_batch_whose_logits_it_has() -> None:
    logits = [torch.randn(ROWS, 1, 8) for _ in range(2)]
    router, made = watched({}, range(ROWS), [(0, 0), (0, 1)])
    for each in logits:
        router.routing(each)
    again, _ = watched(merge(made, ROWS), range(ROWS), [(0, 0), (0, 1)])
    noisy = [each + 5 * torch.randn_like(each) for each in logits]
    expected = [again.routing(each)[1] for each in noisy]
    assert torch.equal(again.routing(noisy[0])[1], expected[0])


def test_a_call_that_is_not_recorded_is_routed_by_its_own_scores() -> None:
    logits = torch.randn(ROWS, 1, 8)
    router, made = watched(merge([], ROWS), range(ROWS), [(1, 0)])
    assert torch.equal(router.routing(logits)[1], Router().routing(logits)[1])
    assert [choice.place for choice in made] == [(1, 0, "decoder 1")]


class Gate(nn.Module):
    layer_number = 2

    def choose_experts(self, scores_SBE: Tensor) -> Tensor:
        return scores_SBE.topk(2, dim=-1).indices


def watched_gate(replayed: Any, places: list[tuple[int, int]]) -> tuple[Gate, list[RoutingChoice]]:
    gate, made = Gate(), list[RoutingChoice]()
    RoutingRecord(replayed, lambda length: (*places.pop(0), range(ROWS)), made).watch([nn.Sequential(gate)])
    return gate, made


def test_modules_that_choose_by_themselves_repeat_too_whole_or_part_by_part() -> None:
    scores = [torch.randn(ROWS, 1, 8) for _ in range(2)]
    gate, made = watched_gate({}, [(0, 0), (0, 1)])
    expected = [gate.choose_experts(each) for each in scores]
    assert [choice.place for choice in made] == [(0, 0, "decoder 2"), (0, 1, "decoder 2")]
    again, more = watched_gate(merge(made, ROWS), [(0, 0), (0, 0), (0, 1), (0, 1)])
    noisy = [each + 5 * torch.randn_like(each) for each in scores]
    for batch, chosen in zip(noisy, expected, strict=True):
        parts = [again.choose_experts(part) for part in batch.chunk(2)]
        assert torch.equal(torch.cat(parts), chosen)
    assert torch.equal(again.choose_experts(noisy[0][:2]), expected[0][:2])  # as recomputation asks once more
    assert torch.equal(again.choose_experts(noisy[1][2:]), expected[1][2:])
    assert more == []


def test_choices_made_part_by_part_are_joined() -> None:
    scores = torch.randn(ROWS, 1, 8)
    gate, made = watched_gate({}, [(0, 0), (0, 0)])
    parts = [gate.choose_experts(part) for part in scores.chunk(2)]
    assert torch.equal(torch.from_numpy(merge(made, ROWS)[0, 0, "decoder 2"][0]).long(), torch.cat(parts))
