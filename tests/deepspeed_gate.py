"""The gate against DeepSpeed's own: ``python -m tests.deepspeed_gate``, with its sources on the path (``make test-deepspeed``).

T tokens, E experts, C places. Compared are the weights [T, E, C] of combination, whose numbers above zero are the kept set,
and the auxiliary loss.
"""

import sys
from collections.abc import Iterator
from itertools import product

import torch
from deepspeed.moe import sharded_moe
from torch import Tensor

from mindspeed.features.deepspeed_moe.gating import Choices, Routing, admit, choose
from mindspeed.moe.capacity import capacity_of

FACTORS = (0.5, 1.0, 1.25, 4.0, 8.0)
SEEDS = range(12)
TOKENS, MINIMUM = 48, 2


def cases() -> Iterator[tuple[Tensor, float]]:
    """Logits [T, E] and capacity factors; of every third case one expert is everybody's, another one nobody's."""
    for seed, factor, experts in product(SEEDS, FACTORS, (4, 8)):
        logits = torch.randn(TOKENS, experts, generator=torch.Generator().manual_seed(seed))
        if seed % 3 == 0:
            logits[:, 1] += 9
            logits[:, 2] -= 9
        yield logits, factor


def ours(logits: Tensor, topk: int, factor: float, draws: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Weights and loss of one group."""
    choices: Choices = choose(logits.unsqueeze(0), topk, draws_GT=None if draws is None else draws.unsqueeze(0))
    capacity = capacity_of(TOKENS, logits.shape[1], topk, factor, MINIMUM)
    routing: Routing = admit(choices, capacity)
    weights = torch.zeros(TOKENS, logits.shape[1], capacity + 1)
    tokens = torch.arange(TOKENS).unsqueeze(1).expand(TOKENS, topk)
    weights[tokens, routing.expert[0], routing.slot[0]] = routing.weight[0]
    return weights[..., :capacity], choices.balance_loss()


def equal(some: tuple[Tensor, Tensor], others: tuple[Tensor, Tensor]) -> bool:
    """Tell whether weights and losses agree to 1e-6, and the kept sets and places exactly."""
    (weights, loss), (theirs, their_loss) = some, others
    places = min(weights.shape[-1], theirs.shape[-1])
    if theirs[..., places:].any() or weights[..., places:].any():
        return False
    near = torch.allclose(weights[..., :places], theirs[..., :places], rtol=0, atol=1e-6)
    return (
        near
        and bool(((weights > 0)[..., :places] == (theirs > 0)[..., :places]).all())
        and abs(float(loss - their_loss)) < 1e-6
    )


def two_choices(logits: Tensor, factor: float) -> bool:
    loss, weights, _, _ = sharded_moe.top2gating(logits.clone(), factor, MINIMUM, top2_2nd_expert_sampling=False)
    return equal(ours(logits, 2, factor), (weights, loss))


def one_choice_by_lot(logits: Tensor, factor: float) -> bool:
    draws = torch.rand(logits.shape, generator=torch.Generator().manual_seed(1))
    sharded_moe.exp_selection_uniform_map[logits.device] = lambda shape: draws
    loss, weights, _, _ = sharded_moe.top1gating(logits, factor, MINIMUM, use_rts=True)
    of_token = draws.gather(1, logits.argmax(1, keepdim=True)).squeeze(1)
    return equal(ours(logits, 1, factor, of_token), (weights, loss))


def one_choice_counts(logits: Tensor, factor: float) -> bool:
    loss, weights, _, _ = sharded_moe.top1gating(logits, factor, MINIMUM, use_rts=False)
    mine, my_loss = ours(logits, 1, factor)
    counts = [(w > 0).sum((0, 2)) for w in (mine, weights)]
    return torch.equal(*counts) and abs(float(my_loss - loss)) < 1e-6


def one_choice_tokens(logits: Tensor, factor: float) -> bool:
    loss, weights, _, _ = sharded_moe.top1gating(logits, factor, MINIMUM, use_rts=False)
    return equal(ours(logits, 1, factor), (weights, loss))


def four_choices(logits: Tensor, factor: float) -> bool:
    loss, weights, _, _ = sharded_moe.topkgating(logits.clone(), 4, factor, MINIMUM)
    mine, _ = ours(logits, 4, factor)
    return equal((mine, loss), (weights, loss))


COMPARISONS = {
    "two choices, no sampling of the second": (two_choices, True),
    "one choice, equal draws": (one_choice_by_lot, True),
    "one choice without draws, tokens kept per expert": (one_choice_counts, True),
    "one choice without draws, the very tokens": (one_choice_tokens, False),
    "four choices, weights alone": (four_choices, True),
}
"""Comparisons, and whether all cases must agree: DeepSpeed's topk takes any of equal tokens."""


def main() -> int:
    """Print how many cases agree; 1 if one that must does not."""
    failed = 0
    for name, (agrees, required) in COMPARISONS.items():
        results = [agrees(logits, factor) for logits, factor in cases()]
        failed += required and not all(results)
        print(f"{name:50} {sum(results)} of {len(results)} equal{'' if required else ' (not required)'}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
