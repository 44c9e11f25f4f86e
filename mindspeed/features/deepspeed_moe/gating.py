"""A gate with a capacity, as DeepSpeed's and GShard's: the experts of each token, their places, weights and losses.

G groups of tokens, T tokens of a group, E experts, K experts per token, C places of an expert for the tokens of a group.
Groups know nothing of each other, so that what is kept does not depend on which rank has which group. All arithmetic is in
the type of the logits, which callers make fp32.

With two choices per token the second choices of an expert queue behind all first ones. With three and more, and wherever
draws are given, an expert keeps the tokens of the highest score instead of the first ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

SINKHORN_ROUNDS: Final = 16
"""Normalizations of rows and columns; a fixed number, for a test of convergence would wait for the device."""


@dataclass(frozen=True, slots=True)
class Choices:
    """The experts that tokens chose, before any capacity.

    ``logits`` and their softmax ``p`` are [G, T, E]. ``expert`` and ``probability`` [G, T, K] are in the order of choice.
    ``draws`` [G, T, K] decide who keeps a place where an expert has too few; None is first come, first served.
    """

    logits: Tensor
    p: Tensor
    expert: Tensor
    probability: Tensor
    draws: Tensor | None

    @property
    def topk(self) -> int:
        return self.expert.shape[-1]

    @property
    def experts(self) -> int:
        return self.p.shape[-1]

    def balance_loss(self) -> Tensor:
        """E sum_e mean(p_e) mean(first_e), averaged over groups, without coefficient."""
        first_GT = self.expert[..., 0]
        ones_GT = torch.ones_like(self.p[..., 0])
        first_GE = torch.zeros_like(self.p[:, 0]).scatter_add_(1, first_GT, ones_GT) / first_GT.shape[1]
        return self.experts * (self.p.mean(1) * first_GE).sum(-1).mean()

    def z_loss(self) -> Tensor:
        """The mean square of the logarithm of the partition function, without coefficient."""
        return self.logits.logsumexp(-1).square().mean()

    def need(self) -> Tensor:
        """The capacity that drops no token: the most tokens that chose one expert in one group. A scalar on the device."""
        chosen_GN = self.expert.flatten(1)
        counts_GE = chosen_GN.new_zeros((chosen_GN.shape[0], self.experts))
        return counts_GE.scatter_add_(1, chosen_GN, torch.ones_like(chosen_GN)).amax()


@dataclass(frozen=True, slots=True)
class Routing:
    """The places of tokens, each [G, T, K]. ``slot`` is the place in the expert's C, C where the choice is dropped.

    ``weight`` is 0 there; with several choices the weights of a token are divided by their sum.
    """

    expert: Tensor
    slot: Tensor
    weight: Tensor
    experts: int
    capacity: int

    @property
    def rows(self) -> int:
        """Rows of all experts: E x G x C."""
        return self.experts * self.expert.shape[0] * self.capacity

    def kept(self) -> Tensor:
        """The map [G x T, E] of the choices that got a place."""
        groups, tokens, _ = self.expert.shape
        places = self.slot.new_zeros((groups, tokens, self.experts), dtype=torch.bool)
        return places.scatter(-1, self.expert, self.slot < self.capacity).flatten(0, 1)

    def row(self) -> Tensor:
        """The row of each choice where rows stand by expert, group and place; `rows` where the choice is dropped."""
        groups = self.expert.shape[0]
        group_G11 = torch.arange(groups, device=self.expert.device).view(-1, 1, 1)
        row = (self.expert * groups + group_G11) * self.capacity + self.slot
        return torch.where(self.slot < self.capacity, row, self.rows)


def choose(
    logits_GTE: Tensor,
    topk: int,
    gumbel_GTE: Tensor | None = None,
    draws_GT: Tensor | None = None,
    sinkhorn: bool = False,
    select: Callable[[Tensor, int], Tensor] | None = None,
) -> Choices:
    """Let each token choose ``topk`` experts of the largest probability, the lower number first where two are equal.

    ``gumbel_GTE`` is added to the logits that decide. ``sinkhorn`` lets logits decide that are balanced over experts. Neither
    changes a probability. ``draws_GT`` in [0, 1) give the places of an expert by lot, for one choice per token. ``select`` may
    stand for `highest`.
    """
    p_GTE = logits_GTE.softmax(-1)
    score_GTE = p_GTE.detach()
    if gumbel_GTE is not None:
        score_GTE = logits_GTE.detach() + gumbel_GTE
    if sinkhorn:
        score_GTE = balanced(score_GTE if gumbel_GTE is not None else logits_GTE.detach())
    expert_GTK = (select or highest)(score_GTE, topk)
    probability_GTK = p_GTE.gather(-1, expert_GTK)
    draws_GTK = draws_GT.unsqueeze(-1) if draws_GT is not None else probability_GTK.detach() if topk > 2 else None
    return Choices(logits_GTE, p_GTE, expert_GTK, probability_GTK, draws_GTK)


def highest(scores: Tensor, topk: int) -> Tensor:
    """Give the ``topk`` numbers of the highest scores along the last dimension, the lower number first where two are equal."""
    chosen = []
    for _ in range(topk):
        number = scores.argmax(-1)
        chosen.append(number)
        scores = scores.scatter(-1, number.unsqueeze(-1), -torch.inf)
    return torch.stack(chosen, -1)


def admit(choices: Choices, capacity: int) -> Routing:
    """Give ``capacity`` places of each expert to the tokens that chose it, and weights to the choices that got one."""
    if choices.draws is None:
        queue_GN = choices.expert.transpose(1, 2).flatten(1)  # all first choices, then all second ones
        place_GN = _places(queue_GN, choices.experts)
        place_GTK = place_GN.view(choices.expert.transpose(1, 2).shape).transpose(1, 2)
    else:
        place_GTK = _places_by_draw(choices, choices.draws, capacity)
    kept_GTK = place_GTK < capacity
    weight_GTK = choices.probability * kept_GTK
    if choices.topk > 1:
        weight_GTK = weight_GTK / weight_GTK.sum(-1, keepdim=True).clamp(min=torch.finfo(weight_GTK.dtype).eps)
    return Routing(choices.expert, place_GTK.clamp(max=capacity), weight_GTK, choices.experts, capacity)


def balanced(logits_GTE: Tensor) -> Tensor:
    """Scale ``exp(logits)`` by rows and columns (Sinkhorn) until experts get equal shares; returns logarithms."""
    log_GTE = logits_GTE.log_softmax(-1)
    for _ in range(SINKHORN_ROUNDS):
        log_GTE = log_GTE - log_GTE.logsumexp(1, keepdim=True)
        log_GTE = log_GTE - log_GTE.logsumexp(-1, keepdim=True)
    return log_GTE


def _places_by_draw(choices: Choices, draws_GTK: Tensor, capacity: int) -> Tensor:
    """The places in token order of those with the highest draws of an expert; others have at least ``capacity``."""
    expert_GN, draws_GN = choices.expert.flatten(1), draws_GTK.flatten(1)
    order_GN = draws_GN.argsort(dim=-1, descending=True, stable=True)
    ranked_GN = _places(expert_GN.gather(1, order_GN), choices.experts)
    rank_GN = torch.empty_like(ranked_GN).scatter_(1, order_GN, ranked_GN)
    kept_GN = rank_GN < capacity
    place_GN = _places(torch.where(kept_GN, expert_GN, choices.experts), choices.experts + 1)
    return torch.where(kept_GN, place_GN, capacity).view(choices.expert.shape)


def _places(expert_GN: Tensor, experts: int) -> Tensor:
    """The number of earlier entries with the same expert: one stable sort, then each entry's distance to its expert's first."""
    order_GN = expert_GN.argsort(dim=-1, stable=True)
    counts_GE = expert_GN.new_zeros((expert_GN.shape[0], experts))
    counts_GE.scatter_add_(1, expert_GN, torch.ones_like(expert_GN))
    starts_GE = counts_GE.cumsum(-1) - counts_GE
    everything_N = torch.arange(expert_GN.shape[1], device=expert_GN.device)
    sorted_GN = everything_N - starts_GE.gather(1, expert_GN.gather(1, order_GN))
    return torch.empty_like(sorted_GN).scatter_(1, order_GN, sorted_GN)
