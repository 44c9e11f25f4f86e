"""Old import name; see `mindspeed.compat.manager`."""

from mindspeed.compat.manager import MindSpeedFeaturesManager as MindSpeedFeaturesManager

__all__ = ["MindSpeedFeaturesManager"]
