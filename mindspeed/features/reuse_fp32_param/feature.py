"""fp32 main weights that exist only while the optimizer updates them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mindspeed import plugins as ms
from mindspeed.memory.conditions import MAIN_WEIGHTS
from mindspeed.plugins.saved_tensors import SavedTensors


class ReuseFp32ParamArgs(ms.FeatureArgs):
    parts: int = ms.Field(
        16,
        ge=1,
        description="Number of groups of parameters that an optimizer step updates one after the other. fp32 main weights "
        "exist for one group at a time, so more groups use less memory",
    )


class ReuseFp32Param(ms.Feature[ReuseFp32ParamArgs]):
    """Store bf16 weights and residuals, not fp32.

    Each fp32 main weight is stored as the bf16 weight of the model and a 16-bit residual. The optimizer step restores
    the exact fp32 values, for one group of parameters at a time.
    """

    spec = ms.FeatureSpec(
        name="reuse-fp32-param",
        category=ms.Category.MEMORY,
        constraints=(
            ms.Condition.equals(
                "dtype", "bf16", "weights are {world.dtype}, but {feature} supports only bf16 weights with a 16-bit residual"
            ),
            ms.Condition.unset(
                "precision_aware_optimizer",
                "the precision-aware optimizer already manages main weights, so {feature} has nothing to do",
                otherwise="idle",
            ),
            *MAIN_WEIGHTS,
        ),
        numerics=ms.Numerics.exact(),
        verify_with=ms.VerifyWith(world={"dtype": "bf16"}),
        own_trainer="from mindspeed.optim import ReuseFp32Param",
    )

    @ms.hookimpl
    def patches(self) -> list[ms.Patch]:
        from mindspeed.memory.patches import optimizer_patches

        return optimizer_patches()

    @ms.hookimpl
    def resting(self, tensors: SavedTensors) -> SavedTensors:
        """Return residuals of half the bytes in the place of main weights."""
        return tuple(replace(t, name="residuals", bytes=t.bytes // 2) if t.name == "main weights" else t for t in tensors)

    @ms.hookimpl
    def optimizer_built(self, optimizer: Any) -> None:
        if self.world.is_set("precision_aware_optimizer"):
            return
        from mindspeed.features.reuse_fp32_param.joined import joined
        from mindspeed.memory.optimizer_windows import manage

        manage(optimizer, self.args.parts, joined, self.spec.name)
