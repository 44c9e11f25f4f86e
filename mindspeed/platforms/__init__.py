"""Platforms: the device layer that lets unmodified Megatron run on npu, cuda or cpu. One is active per process.

Light: choosing a platform imports neither torch nor a vendor package.
"""

from __future__ import annotations

import glob
import os
from importlib import util
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Final

from mindspeed.job.fields import PLATFORMS
from mindspeed.problems import Fix, PlatformError, Problem

if TYPE_CHECKING:
    from mindspeed.plugins.feature import Feature

PLATFORM_VARIABLE: Final = "MINDSPEED_PLATFORM"
"""Environment variable that decides before any detection."""

ACTIVE: str | None = None
"""The platform that the active plan installed; None without a plan. Here, because this module is loaded before any plan."""

_DEVICE_NODES: Final = {"npu": "/dev/davinci[0-9]*", "cuda": "/dev/nvidia[0-9]*"}


def detect() -> str:
    """The platform of this machine: ``MINDSPEED_PLATFORM``, else npu (torch_npu and a device node), else cuda, else cpu."""
    if chosen := os.environ.get(PLATFORM_VARIABLE):
        return chosen
    if util.find_spec("torch_npu") is not None and glob.glob(_DEVICE_NODES["npu"]):
        return "npu"
    return "cuda" if glob.glob(_DEVICE_NODES["cuda"]) else "cpu"


def device_layer(platform: str) -> type[Feature[Any]]:
    """The feature that makes unmodified Megatron run on a platform.

    Raises PlatformError for a name that is none of `PLATFORMS`.
    """
    if platform not in PLATFORMS:
        fix = Fix.advise(f"use one of {', '.join(PLATFORMS)}")
        raise PlatformError([Problem("MS501", f"unknown platform {platform!r}", fix=fix)])
    layer: type[Feature[Any]] = resolve_name(f"{__name__}.{platform}:{platform.capitalize()}Platform")
    return layer
