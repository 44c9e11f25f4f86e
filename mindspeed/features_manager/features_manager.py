"""Old import name; see `mindspeed.legacy.manager`."""

from mindspeed.legacy.manager import MindSpeedFeaturesManager as MindSpeedFeaturesManager

__all__ = ["MindSpeedFeaturesManager"]

__path__: list[str] = []  # `mindspeed.legacy.imports` is asked for the names that are not here
