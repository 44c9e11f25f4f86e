"""Masks of tests, as a user would bring them."""

import torch
from torch import Tensor


def dilated(tokens: int) -> Tensor:
    """Causal, and of the keys only every other one."""
    place = torch.arange(tokens)
    return (place[:, None] < place[None, :]) | ((place[:, None] - place[None, :]) % 2 == 1)


def without_shape(tokens: int) -> Tensor:
    return torch.zeros(tokens, dtype=torch.bool)


def numbers(tokens: int) -> Tensor:
    return torch.zeros(tokens, tokens)
