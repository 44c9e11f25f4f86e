"""Two runs whose scores tie choose the same experts, and weigh them by their own scores."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mindspeed.verification.record import Choice
from mindspeed.verification.routing import RoutingRecord, merge

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


def watched(replayed: Any, rows: range, places: list[tuple[int, int]]) -> tuple[Router, list[Choice]]:
    router, made = Router(), list[Choice]()
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
