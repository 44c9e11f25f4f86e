"""npu-platform: torch_npu's own mapping of ``torch.cuda`` and nccl to the Ascend device and HCCL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindspeed.platforms.missing_packages import GROUPED_EXPERTS, OFFLOADING, PRECISION_AWARE
from mindspeed.plugins import ArgOverride, Category, Feature, FeatureArgs, FeatureSpec, Field, Patch, Ref, Set, hookimpl


class NpuPlatformArgs(FeatureArgs):
    transformer_engine: bool = Field(False, description="a Transformer Engine for Ascend is installed on every rank")


class NpuPlatform(Feature[NpuPlatformArgs]):
    """Run code written for CUDA and NCCL on Ascend devices with HCCL."""

    spec = FeatureSpec(
        name="npu-platform",
        category=Category.PLATFORM,
        level=0,
        platforms={"npu"},
        constraints=(GROUPED_EXPERTS, OFFLOADING, PRECISION_AWARE),
    )

    @hookimpl
    def job_values(self) -> Mapping[str, Any]:
        return {"engine_installed": True} if self.args.transformer_engine else {}

    @hookimpl
    def megatron_args(self) -> list[ArgOverride]:
        if self.args.transformer_engine:
            return []
        reason = "Transformer Engine is not installed (if it is: --set npu-platform.transformer_engine=true)"
        return [ArgOverride("transformer_impl", "local", reason)]

    @hookimpl
    def patches(self) -> list[Patch]:
        reason = (
            "records the platform of this process, which must be the only one; torch_npu maps torch.cuda and NCCL to Ascend"
        )
        return [Set("mindspeed.platforms:ACTIVE", Ref("mindspeed.platforms.npu_transfer:ACTIVE"), reason, phase="setup")]
