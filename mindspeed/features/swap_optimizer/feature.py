"""Main weights and states of the optimizer that rest in host memory."""

from __future__ import annotations

from typing import Any

from mindspeed.memory.conditions import MAIN_WEIGHTS
from mindspeed.plugins import (
    After,
    Category,
    Feature,
    FeatureArgs,
    FeatureSpec,
    Field,
    Numerics,
    Patch,
    SavedTensors,
    VerifyWith,
    hookimpl,
    leave,
)

_LEAVING = ("main weights", "residuals", "states")


class SwapOptimizerArgs(FeatureArgs):
    parts: int = Field(
        16,
        ge=1,
        description="Number of groups of parameters that an optimizer step updates one after the other. At most three groups "
        "are on the device, so more groups use less memory",
    )


class SwapOptimizer(Feature[SwapOptimizerArgs]):
    """Offload optimizer states to host memory.

    Main weights are offloaded too. The optimizer step prefetches, updates and offloads one group of parameters after the
    other.
    """

    spec = FeatureSpec(
        name="swap-optimizer",
        category=Category.MEMORY,
        constraints=(*MAIN_WEIGHTS, After("reuse-fp32-param")),
        numerics=Numerics.exact(),
        verify_with=VerifyWith(world={"dtype": "bf16"}),
    )

    @hookimpl
    def patches(self) -> list[Patch]:
        from mindspeed.memory.patches import optimizer_patches

        return optimizer_patches()

    @hookimpl
    def resting(self, tensors: SavedTensors) -> SavedTensors:
        return leave(tensors, _LEAVING, "swapped", self.spec.name)

    @hookimpl
    def optimizer_built(self, optimizer: Any) -> None:
        from mindspeed.features.swap_optimizer.swapped import Swapped
        from mindspeed.memory.optimizer_windows import manage

        manage(optimizer, self.args.parts, Swapped().around, self.spec.name)
