"""Old import name; see `mindspeed.legacy.manager`, and `mindspeed.legacy.feature_classes` for MindSpeed's classes."""

from mindspeed.legacy.feature import MindSpeedFeature as MindSpeedFeature
from mindspeed.legacy.feature import create_features_list as create_features_list
from mindspeed.legacy.manager import MindSpeedFeaturesManager as MindSpeedFeaturesManager

__all__ = ["FEATURES_LIST", "MindSpeedFeature", "MindSpeedFeaturesManager", "create_features_list"]

FEATURES_LIST = MindSpeedFeaturesManager.FEATURES_LIST


def __getattr__(name: str) -> object:
    from mindspeed.legacy.feature_classes import CLASSES, stand_in

    if name in CLASSES:
        return stand_in(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
