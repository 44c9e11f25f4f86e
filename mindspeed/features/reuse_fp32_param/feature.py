"""fp32 main weights that exist only while the optimizer updates them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mindspeed.memory.conditions import MAIN_WEIGHTS
from mindspeed.plugins import (
    Category,
    Feature,
    FeatureArgs,
    FeatureSpec,
    Field,
    GiveField,
    Numerics,
    Patch,
    RemoveFeature,
    SavedTensors,
    VerifyWith,
    World,
    condition,
    hookimpl,
)


class ReuseFp32ParamArgs(FeatureArgs):
    parts: int = Field(
        16,
        ge=1,
        description="Number of groups of parameters that an optimizer step updates one after the other. fp32 main weights "
        "exist for one group at a time, so more groups use less memory",
    )


@condition(
    "weights are {world.dtype}, but {feature} supports only bf16 weights with a 16-bit residual",
    fix=(GiveField("dtype", "bf16"), RemoveFeature()),
)
def weights_are_bf16(args: ReuseFp32ParamArgs, world: World) -> bool:
    """Check that weights are bf16."""
    return bool(world.dtype == "bf16")


class ReuseFp32Param(Feature[ReuseFp32ParamArgs]):
    """Store bf16 weights and residuals, not fp32.

    Each fp32 main weight is stored as the bf16 weight of the model and a 16-bit residual. The optimizer step restores
    the exact fp32 values, for one group of parameters at a time.
    """

    spec = FeatureSpec(
        name="reuse-fp32-param",
        category=Category.MEMORY,
        constraints=(weights_are_bf16, *MAIN_WEIGHTS),
        numerics=Numerics.exact(),
        verify_with=VerifyWith(world={"dtype": "bf16"}),
    )

    @hookimpl
    def patches(self) -> list[Patch]:
        from mindspeed.memory.patches import optimizer_patches

        return optimizer_patches()

    @hookimpl
    def resting(self, tensors: SavedTensors) -> SavedTensors:
        """Return residuals of half the bytes in the place of main weights."""
        return tuple(replace(t, name="residuals", bytes=t.bytes // 2) if t.name == "main weights" else t for t in tensors)

    @hookimpl
    def optimizer_built(self, optimizer: Any) -> None:
        from mindspeed.features.reuse_fp32_param.joined import joined
        from mindspeed.memory.optimizer_windows import manage

        manage(optimizer, self.args.parts, joined, self.spec.name)
