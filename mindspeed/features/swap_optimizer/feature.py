"""Main weights and states of the optimizer that rest in host memory."""

from __future__ import annotations

from typing import Any

from mindspeed.plugins import (
    After,
    Category,
    Feature,
    FeatureArgs,
    FeatureSpec,
    Field,
    Numerics,
    Patch,
    VerifyWith,
    hookimpl,
    leave,
)

_LEAVING = ("main weights", "residuals", "states")


class SwapOptimizerArgs(FeatureArgs):
    parts: int = Field(16, ge=1, description="windows of an optimizer step; three of them are on the device at most")


class SwapOptimizer(Feature[SwapOptimizerArgs]):
    """Keep main weights and optimizer states on the host, and bring a window of them to the device at a time."""

    spec = FeatureSpec(
        name="swap-optimizer",
        summary="Main weights and optimizer states in host memory, on the device for their part of the step alone",
        category=Category.MEMORY,
        constraints=(After("reuse-fp32-param"),),
        numerics=Numerics.exact(),
        resting=lambda args, world, tensors: leave(tensors, _LEAVING, "swapped", "swap-optimizer"),
        verify_with=VerifyWith(world={"dtype": "bf16"}),
    )

    @hookimpl
    def patches(self) -> list[Patch]:
        from mindspeed.memory.patches import optimizer_patches

        return optimizer_patches()

    @hookimpl
    def config_ready(self, config: Any) -> None:
        from mindspeed.memory.optimizer_refusals import config_refusals

        if wrong := config_refusals(config):
            self.decline(" and ".join(wrong))

    @hookimpl
    def optimizer_built(self, optimizer: Any) -> None:
        from mindspeed.memory.optimizer_refusals import optimizer_refusals
        from mindspeed.memory.optimizer_windows import manage
        from mindspeed.memory.swapped import Swapped

        if wrong := optimizer_refusals(optimizer):
            self.decline(" and ".join(wrong))
            return
        manage(optimizer, self.args.parts, Swapped().around, self.spec.name)
