"""Activation functions of the fused feed-forward operators, by the names of the accelerator's library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor


def fast_gelu(x: Tensor) -> Tensor:
    """GELU by one sigmoid: ``x sigmoid(1.702 x)``."""
    return x * torch.sigmoid(1.702 * x)


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU by its tanh approximation."""
    return F.gelu(x, approximate="tanh")


PLAIN: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "gelu": F.gelu,
    "fastgelu": fast_gelu,
    "relu": F.relu,
    "silu": F.silu,
}
GATED: Final[dict[str, Callable[[Tensor], Tensor]]] = {"geglu": F.gelu, "swiglu": F.silu, "reglu": F.relu}
"""Activations of the first half of the last dimension, which then multiplies the second half."""


def activate(x: Tensor, name: str) -> Tensor:
    """The activation called ``name`` of ``x``; a gated one halves the last dimension."""
    if name in GATED:
        gate, value = x.chunk(2, -1)
        return GATED[name](gate) * value
    return PLAIN[name](x)
