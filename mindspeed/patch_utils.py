"""Old import name; see `mindspeed.legacy.patches`."""

from mindspeed.legacy.patches import MindSpeedPatchesManager as MindSpeedPatchesManager
from mindspeed.legacy.patches import PatchInfo as Patch
from mindspeed.legacy.patches import is_megatron_training_available as is_megatron_training_available

__all__ = ["MindSpeedPatchesManager", "Patch", "is_megatron_training_available"]

__path__: list[str] = []  # `mindspeed.legacy.imports` is asked for the names that are not here
