"""Main weights and states of the optimizer that rest in host memory."""

from __future__ import annotations

from typing import Any

from mindspeed import plugins as ms
from mindspeed.memory.conditions import MAIN_WEIGHTS
from mindspeed.plugins.saved_tensors import SavedTensors, leave

_LEAVING = ("main weights", "residuals", "states")


class SwapOptimizerArgs(ms.FeatureArgs):
    parts: int = ms.Field(
        16,
        ge=1,
        description="Number of groups of parameters that an optimizer step updates one after the other. At most three groups "
        "are on the device, so more groups use less memory",
    )


class SwapOptimizer(ms.Feature[SwapOptimizerArgs]):
    """Offload optimizer states to host memory.

    Main weights are offloaded too. The optimizer step prefetches, updates and offloads one group of parameters after the
    other.
    """

    spec = ms.FeatureSpec(
        name="swap-optimizer",
        category=ms.Category.MEMORY,
        constraints=(
            ms.Condition.unset("precision_aware_optimizer", "the precision-aware optimizer already manages main weights"),
            *MAIN_WEIGHTS,
            ms.After("reuse-fp32-param"),
        ),
        numerics=ms.Numerics.exact(),
        verify_with=ms.VerifyWith(world={"dtype": "bf16"}),
        own_trainer="from mindspeed.optim import SwapOptimizer",
    )

    @ms.hookimpl
    def patches(self) -> list[ms.Patch]:
        from mindspeed.memory.patches import optimizer_patches

        return optimizer_patches()

    @ms.hookimpl
    def resting(self, tensors: SavedTensors) -> SavedTensors:
        return leave(tensors, _LEAVING, "swapped", self.spec.name)

    @ms.hookimpl
    def optimizer_built(self, optimizer: Any) -> None:
        from mindspeed.features.swap_optimizer.swapped import Swapped
        from mindspeed.memory.optimizer_windows import manage

        manage(optimizer, self.args.parts, Swapped().around, self.spec.name)
