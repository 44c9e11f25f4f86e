"""Moments of the optimizer in bf16."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mindspeed import plugins as ms
from mindspeed.memory.conditions import MAIN_WEIGHTS
from mindspeed.plugins.saved_tensors import SavedTensors


class Bf16MomentsArgs(ms.FeatureArgs):
    parts: int = ms.Field(
        16,
        ge=1,
        description="Number of groups of parameters that an optimizer step updates one after the other. fp32 moments exist for "
        "one group at a time, so more groups use less memory",
    )


class Bf16Moments(ms.Feature[Bf16MomentsArgs]):
    """Store Adam's moments in bf16.

    The optimizer step computes with fp32 moments and fp32 main weights, and rounds the moments to bf16 afterwards. fp32 moments
    exist for one group of parameters at a time.
    """

    spec = ms.FeatureSpec(
        name="bf16-moments",
        category=ms.Category.MEMORY,
        constraints=(
            ms.Condition.unset(
                "precision_aware_optimizer",
                "the precision-aware optimizer already chooses the type of the moments (--exp-avg-dtype, --exp-avg-sq-dtype)",
            ),
            *MAIN_WEIGHTS,
            ms.Before("swap-optimizer"),
        ),
        numerics=ms.Numerics.approximate(
            loss=1e-2,
            gradient=1e-6,
            reason="each step rounds both moments to the 8 significant bits of bf16; the first step is exact",
        ),
        verify_with=ms.VerifyWith(world={"dtype": "bf16"}),
        own_trainer="it rounds the states of Megatron's optimizers; mindspeed.optim has no such wrapper",
    )

    @ms.hookimpl
    def patches(self) -> list[ms.Patch]:
        from mindspeed.memory.patches import optimizer_patches

        return optimizer_patches()

    @ms.hookimpl
    def resting(self, tensors: SavedTensors) -> SavedTensors:
        """Return states of half the bytes."""
        return tuple(replace(t, bytes=t.bytes // 2) if t.name == "states" else t for t in tensors)

    @ms.hookimpl
    def optimizer_built(self, optimizer: Any) -> None:
        from mindspeed.features.bf16_moments.moments import in_fp32
        from mindspeed.memory.optimizer_windows import manage

        manage(optimizer, self.args.parts, in_fp32, self.spec.name)
