"""Masks of tests: functions of the number of tokens, True where hidden."""

import random

import torch
from torch import Tensor


def interleaved(tokens: int) -> Tensor:
    """Causal, and each token sees only those whose number is even or odd like its own."""
    place = torch.arange(tokens)
    return (place[:, None] < place[None, :]) | (place[:, None] % 2 != place[None, :] % 2)


def window(tokens: int, width: int) -> Tensor:
    """Each token sees ``width`` tokens, itself the last."""
    return ~torch.ones(tokens, tokens, dtype=torch.bool).tril().triu(1 - width)


def scattered(tokens: int) -> Tensor:
    """A random mask with blocks of any size that see nothing, on the diagonal as well, and a row that sees nothing."""
    mask = torch.rand(tokens, tokens, generator=torch.Generator().manual_seed(2)) < 0.5
    mask[: tokens // 2, : tokens // 2] = True
    mask[tokens - 3] = True
    return mask


def documents(tokens: int, count: int = 16, seed: int = 0) -> Tensor:
    """Packed causal documents, whose lengths are drawn from a log-normal distribution (sigma 1.2)."""
    draw = random.Random(seed)
    lengths = torch.tensor([draw.lognormvariate(0, 1.2) for _ in range(count)])
    ends = (lengths.cumsum(0) / lengths.sum() * tokens).round().long()
    number = torch.bucketize(torch.arange(tokens), ends, right=True)
    return (number[:, None] != number[None, :]) | torch.ones(tokens, tokens, dtype=torch.bool).triu_(1)
