"""Old import name; see `mindspeed.legacy.feature`."""

from mindspeed.legacy.feature import MindSpeedFeature as MindSpeedFeature

__all__ = ["MindSpeedFeature"]

__path__: list[str] = []  # `mindspeed.legacy.imports` is asked for the names that are not here
