"""The norms of layers in Transformer Engine's roles, as functions. A feature with an operator for one replaces it."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, gamma: Tensor, epsilon: float) -> Tensor:
    """Normalize the last dimension of ``x`` by its root mean square and scale it by ``gamma``."""
    return functional.rms_norm(x, gamma.shape, gamma, epsilon)


def layer_norm(x: Tensor, gamma: Tensor, beta: Tensor | None, epsilon: float) -> Tensor:
    """Normalize the last dimension of ``x`` to mean 0 and variance 1, scale it by ``gamma`` and add ``beta``."""
    return functional.layer_norm(x, gamma.shape, gamma, beta, epsilon)
