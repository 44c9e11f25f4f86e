"""The linear layers of the experts of a rank whose weights are parameters of their own, as one function.

R rows of tokens, sorted by expert; E experts, I and O the sizes of a layer's input and output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mindspeed.moe.products import ExpertWeightGradient, deferred, grouped_product, weight_gradient

Product = Callable[[Tensor, Tensor], Tensor]
"""Multiply rows [R, I] by the weight [O, I] of one expert."""


def expert_products(x_RI: Tensor, weights_OI: Sequence[Tensor], counts: Sequence[int], product: Product) -> Tensor:
    """Multiply the rows of each expert, ``counts`` of them, by its weight: [R, O].

    A feature with a grouped product replaces this function.
    """
    return single_expert_products(x_RI, weights_OI, counts, product)


def single_expert_products(x_RI: Tensor, weights_OI: Sequence[Tensor], counts: Sequence[int], product: Product) -> Tensor:
    """Multiply the rows of one expert after another."""
    rows = torch.split(x_RI, list(counts))
    return torch.cat([product(part, weight) for part, weight in zip(rows, weights_OI, strict=True)])


def grouped_expert_products(x_RI: Tensor, weights_OI: Sequence[Tensor], counts: Sequence[int], product: Product) -> Tensor:
    """Multiply the rows of all experts by their weights in one grouped product, which takes a copy of the weights."""
    weights_EIO = torch.stack([weight.t() for weight in weights_OI])
    ends = torch.tensor(counts, dtype=torch.int64, device=x_RI.device).cumsum(0)
    weight = deferred(weights_EIO, len(weights_OI), x_RI.shape[-1], gradient_of(weights_OI, counts))
    return grouped_product(x_RI, weight, ends)


def gradient_of(weights_OI: Sequence[Tensor], counts: Sequence[int]) -> ExpertWeightGradient:
    """Return how the gradient of these weights is computed.

    A feature that adds gradients to their buffers replaces this function.
    """
    return weight_gradient
