"""The loss itself: plain torch, and one wrapper for Megatron."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Shapes: S sequence, B batch, V vocabulary share of this rank


class _SumOverGroup(torch.autograd.Function):
    """All-reduce whose gradient is the identity, as every rank goes on with the same sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def log_normalizer(logits_SBV: Tensor, group: Any = None) -> Tensor:
    """log of the sum of exp(logits) over a vocabulary that is split over ``group`` (None: not split): [S, B], fp32."""
    logits_SBV = logits_SBV.float()
    largest_SB = logits_SBV.detach().amax(-1)
    if group is None or group.size() == 1:
        return largest_SB + (logits_SBV - largest_SB[..., None]).exp().sum(-1).log()
    dist.all_reduce(largest_SB, op=dist.ReduceOp.MAX, group=group)
    sums_SB = (logits_SBV - largest_SB[..., None]).exp().sum(-1)
    return largest_SB + _SumOverGroup.apply(sums_SB, group).log()


def with_z_loss(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap ``LanguageModule.compute_language_model_loss``: labels [B, S], logits [S, B, V] -> loss [B, S]."""

    @functools.wraps(original)
    def compute_language_model_loss(self: Any, labels: Tensor, logits: Tensor) -> Tensor:
        z_SB = log_normalizer(logits, self.pg_collection.tp)  # before the original, which may work in place on the logits
        return original(self, labels, logits) + self.config.acme_z_loss * z_SB.square().transpose(0, 1)

    return compute_language_model_loss
