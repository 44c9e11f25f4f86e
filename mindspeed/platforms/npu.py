"""npu-platform: torch_npu's own mapping of ``torch.cuda`` and nccl to the Ascend device and HCCL."""

from __future__ import annotations

from mindspeed.plugins import Category, Feature, FeatureArgs, FeatureSpec, Patch, Set, hookimpl
from mindspeed.plugins.patches import Ref


class NpuPlatform(Feature[FeatureArgs]):
    """Run code written for CUDA and NCCL on Ascend devices with HCCL."""

    spec = FeatureSpec(
        name="npu-platform",
        category=Category.PLATFORM,
        level=0,
        platforms={"npu"},
    )

    @hookimpl
    def patches(self) -> list[Patch]:
        reason = "one platform is active per process; torch_npu maps torch.cuda and nccl when it is named"
        return [Set("mindspeed.platforms:ACTIVE", Ref("mindspeed.platforms.npu_transfer:ACTIVE"), reason, phase="setup")]
