"""Old import name; see `mindspeed.compat.patches`."""

from mindspeed.compat.patches import MindSpeedPatchesManager as MindSpeedPatchesManager
from mindspeed.compat.patches import PatchInfo as Patch

__all__ = ["MindSpeedPatchesManager", "Patch"]
