"""Adapts Megatron when it is imported: the first import of every script of this repository."""

from mindspeed.args_utils import get_mindspeed_args
from mindspeed.features_manager.features_manager import MindSpeedFeaturesManager
from tiny_repository.features import create_features_list

MindSpeedFeaturesManager.set_features_list(create_features_list())
MindSpeedFeaturesManager.apply_features_pre_patches(get_mindspeed_args())
MindSpeedFeaturesManager.apply_features_patches(get_mindspeed_args())
