"""Old import name; see `mindspeed.legacy.manager`."""

from mindspeed.legacy.feature import create_features_list as create_features_list
from mindspeed.legacy.manager import MindSpeedFeaturesManager as MindSpeedFeaturesManager

__all__ = ["FEATURES_LIST", "MindSpeedFeaturesManager", "create_features_list"]

FEATURES_LIST = MindSpeedFeaturesManager.FEATURES_LIST
