"""Old import name; see `mindspeed.legacy.feature`."""

from mindspeed.legacy.feature import MindSpeedFeature as MindSpeedFeature

__all__ = ["MindSpeedFeature"]
