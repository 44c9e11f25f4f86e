"""Conditions of adaptive-recompute that only a built model can decide, imported when it exists."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mindspeed import plugins as ms
from mindspeed.memory.activations import has_own_activation
from mindspeed.memory.model_layers import chosen_layers
from mindspeed.memory.region_checkpoint import norms_of


def fused_parts(feature: ms.Feature[Any], chunks: Sequence[Any]) -> Iterator[str]:
    """Yield a sentence where no layer has a norm or an activation apart."""
    layers = chosen_layers(chunks, None)
    if layers and not any(norms_of(layer) or has_own_activation(layer) for layer in layers):
        yield "every norm and every activation is fused into another function"
