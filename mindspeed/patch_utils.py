"""Old import name; see `mindspeed.legacy.patches`."""

from mindspeed.legacy.patches import MindSpeedPatchesManager as MindSpeedPatchesManager
from mindspeed.legacy.patches import PatchInfo as Patch

__all__ = ["MindSpeedPatchesManager", "Patch"]
