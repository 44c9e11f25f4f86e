"""Old import name; see `mindspeed.compat.feature`."""

from mindspeed.compat.feature import MindSpeedFeature as MindSpeedFeature

__all__ = ["MindSpeedFeature"]
