"""Old import name; see `mindspeed.legacy.manager`."""

from mindspeed.legacy.manager import MindSpeedFeaturesManager as MindSpeedFeaturesManager

__all__ = ["MindSpeedFeaturesManager"]
