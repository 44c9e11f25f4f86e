"""Old import name; see `mindspeed.legacy.manager`."""

from mindspeed.legacy.manager import MindSpeedFeaturesManager as MindSpeedFeaturesManager

__all__ = ["MindSpeedFeaturesManager"]


def __getattr__(name: str) -> object:
    from mindspeed.legacy.imports import missing_name

    raise missing_name(__name__, name)
