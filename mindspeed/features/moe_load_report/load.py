"""Counts of routed tokens by layer and expert, kept on the device between two reads."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


class Load:
    """Count what the routers of this rank sent since the last read: rows of each expert, and choices if none were dropped."""

    def __init__(self) -> None:
        self.rows: dict[int, Tensor] = {}
        self.choices = 0

    def add(self, layer: int, routing_map: Tensor, topk: int) -> None:
        """Add a map [tokens, experts] of a layer."""
        rows = routing_map.sum(0)
        self.rows[layer] = self.rows[layer] + rows if layer in self.rows else rows
        self.choices += len(routing_map) * topk

    def read(self) -> dict[str, float]:
        """Take the numbers since the last read, the one transfer to the host; empty before the first routing.

        ``max_over_mean`` is that of the layer with the most loaded expert, ``idle`` the experts of all layers without a token.
        """
        if not self.rows:
            return {}
        rows_LE = torch.stack(list(self.rows.values())).to("cpu", torch.float64)
        kept, choices = rows_LE.sum().item(), self.choices
        self.rows, self.choices = {}, 0
        uneven = rows_LE.amax(1) / rows_LE.mean(1).clamp(min=1e-9)
        return {
            "max_over_mean": uneven.max().item(),
            "mean_max_over_mean": uneven.mean().item(),
            "idle": float((rows_LE == 0).sum()),
            "dropped": 1 - kept / choices,
        }


def watch(chunks: Sequence[nn.Module]) -> Load:
    """Count what every router in these model chunks gives while they train."""
    load = Load()
    modules: list[Any] = [module for chunk in chunks for module in chunk.modules()]
    layers = [module for module in modules if "router" in dict(module.named_children())]
    for number, layer in enumerate(layers):
        router: Any = layer.router
        listeners: Any = getattr(layer, "routing_listeners", None)
        count = partial(_count, load, number, router)
        if listeners is not None:  # a layer with a gate of its own
            listeners.append(count)
        else:
            router.register_forward_hook(lambda router, inputs, output, count=count: count(output[1]))
    return load


def _count(load: Load, number: int, router: Any, routing_map: Tensor) -> None:
    if router.training and torch.is_grad_enabled():
        load.add(number, routing_map, router.config.moe_router_topk)
