"""cuda-platform: Megatron's own device. Nothing needs a patch."""

from __future__ import annotations

from mindspeed.plugins import Category, Feature, FeatureArgs, FeatureSpec, Patch, Set, hookimpl


class CudaPlatform(Feature[FeatureArgs]):
    """Run on NVIDIA devices with NCCL."""

    spec = FeatureSpec(
        name="cuda-platform",
        category=Category.PLATFORM,
        level=0,
        platforms={"cuda"},
    )

    @hookimpl
    def patches(self) -> list[Patch]:
        return [Set("mindspeed.platforms:ACTIVE", "cuda", "a process can use only one platform", phase="setup")]
