"""fp32 main weights that exist only while the optimizer updates them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mindspeed.plugins import (
    Category,
    Check,
    Feature,
    FeatureArgs,
    FeatureSpec,
    Field,
    Numerics,
    Patch,
    VerifyWith,
    hookimpl,
)


class ReuseFp32ParamArgs(FeatureArgs):
    parts: int = Field(16, ge=1, description="windows of an optimizer step; only the main weights of one exist at a time")


def _resting(args: Any, world: Any, tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    """Residuals of half the bytes in the place of main weights."""
    return tuple(replace(t, name="residuals", bytes=t.bytes // 2) if t.name == "main weights" else t for t in tensors)


class ReuseFp32Param(Feature[ReuseFp32ParamArgs]):
    """Join the fp32 main weights from the bf16 weights and a 16-bit residual, one part of an optimizer step at a time."""

    spec = FeatureSpec(
        name="reuse-fp32-param",
        summary="bf16 weights and 16-bit residuals in place of fp32 main weights",
        category=Category.MEMORY,
        constraints=(
            Check(
                lambda args, world: world.dtype == "bf16",
                "weights are {world.dtype}, and a residual of 16 bits completes bf16 weights alone",
                fix="train in bf16, or remove reuse-fp32-param",
            ),
        ),
        numerics=Numerics.exact(),
        resting=_resting,
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
        from mindspeed.memory.joined import joined
        from mindspeed.memory.optimizer_refusals import optimizer_refusals
        from mindspeed.memory.optimizer_windows import manage

        wrong = optimizer_refusals(optimizer)
        if not optimizer.config.bf16:
            wrong.append("a residual of 16 bits completes bf16 weights alone, and the optimizer has bf16=False")
        if wrong:
            self.decline(" and ".join(wrong))
            return
        manage(optimizer, self.args.parts, joined, self.spec.name)
