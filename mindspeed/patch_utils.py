"""Old import name; see `mindspeed.legacy.patches`."""

from mindspeed.legacy.patches import MindSpeedPatchesManager as MindSpeedPatchesManager
from mindspeed.legacy.patches import PatchInfo as Patch
from mindspeed.legacy.patches import is_megatron_training_available as is_megatron_training_available

__all__ = ["MindSpeedPatchesManager", "Patch", "is_megatron_training_available"]


def __getattr__(name: str) -> object:
    from mindspeed.legacy.imports import missing_name

    raise missing_name(__name__, name)
