"""Old import name; see `mindspeed.legacy.feature`."""

from mindspeed.legacy.feature import MindSpeedFeature as MindSpeedFeature

__all__ = ["MindSpeedFeature"]


def __getattr__(name: str) -> object:
    from mindspeed.legacy.imports import missing_name

    raise missing_name(__name__, name)
