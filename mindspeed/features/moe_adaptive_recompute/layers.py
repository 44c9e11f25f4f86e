"""Experts that are recomputed above a number of rows, and the layer that passes them the number of tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mindspeed import plugins as ms


class RecomputingExperts:
    """Stands before `GroupedExperts`. ``balanced_rows`` are those of a rank whose experts have as many tokens as all others."""

    balanced_rows = 0

    def products(self: Any, x_RH: Tensor, *rest: Any) -> Tensor:
        """Return the outputs of experts, and keep only their input where it has too many rows.

        The number of rows is a shape: nothing is read from the device. Ranks decide for themselves, no transfer is repeated.
        """
        feature = ms.active_feature("moe-adaptive-recompute")
        feature.calls += 1
        compute = super().products  # type: ignore[misc]
        share = len(rest[1]) / self.num_local_experts
        if x_RH.shape[0] <= feature.args.scale * share * self.balanced_rows:
            result: Tensor = compute(x_RH, *rest)
            return result
        feature.fires += 1
        recomputed: Tensor = checkpoint(compute, x_RH, *rest, use_reentrant=False, preserve_rng_state=False)
        return recomputed


def counting_tokens(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around ``MoELayer.forward``: its experts know the rows that they would have in balance."""

    @functools.wraps(original)
    def forward(layer: Any, hidden_states: Tensor, *rest: Any, **more: Any) -> Any:
        tokens = hidden_states.numel() // hidden_states.shape[-1]
        layer.experts.balanced_rows = tokens * layer.config.moe_router_topk * layer.experts.tp_group.size()
        return original(layer, hidden_states, *rest, **more)

    return forward
