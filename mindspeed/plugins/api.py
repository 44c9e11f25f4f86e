"""Every name that a feature author imports; `mindspeed.plugins` hands them out."""

from pydantic import Field

from mindspeed.job.world import UnknownValue, World
from mindspeed.plugins.active import active_feature, feature_ranges, report_problem
from mindspeed.plugins.cache_folder import why_unwritable
from mindspeed.plugins.conditions import Condition, ModelCondition, condition, obstacle, unset
from mindspeed.plugins.constraints import (
    After,
    Before,
    Capability,
    Conflicts,
    Constraint,
    Cost,
    Requires,
    RequiresAny,
    RequiresCapability,
    RequiresSlot,
    Slot,
    Supersedes,
)
from mindspeed.plugins.estimates import Estimate, Traffic
from mindspeed.plugins.feature import (
    Category,
    CheckpointState,
    Feature,
    FeatureArgs,
    FeatureSpec,
    Numerics,
    Stability,
    VerifyWith,
)
from mindspeed.plugins.fixes import (
    AddFeature,
    Advice,
    DropField,
    DropOption,
    DropSetting,
    Fix,
    GiveField,
    GiveOption,
    GiveSetting,
    RemoveFeature,
    RunCommand,
    SettingsError,
    Together,
)
from mindspeed.plugins.hookspecs import hookimpl
from mindspeed.plugins.megatron_flags import MegatronFlag
from mindspeed.plugins.patches import ArgOverride, Mixin, Patch, Ref, Replace, Set, When, Wrap
from mindspeed.plugins.problems import GivenValue, MindSpeedError, Problem
from mindspeed.plugins.process_variables import ProcessVariable
from mindspeed.plugins.saved_tensors import SavedTensor, SavedTensors, in_backward, leave, resized
from mindspeed.plugins.specs import is_unpatched, with_modules, with_parts

__all__ = [
    "AddFeature",
    "Advice",
    "After",
    "ArgOverride",
    "Before",
    "Capability",
    "Category",
    "CheckpointState",
    "Condition",
    "Conflicts",
    "Constraint",
    "Cost",
    "DropField",
    "DropOption",
    "DropSetting",
    "Estimate",
    "Feature",
    "FeatureArgs",
    "FeatureSpec",
    "Field",
    "Fix",
    "GiveField",
    "GiveOption",
    "GiveSetting",
    "GivenValue",
    "MegatronFlag",
    "MindSpeedError",
    "Mixin",
    "ModelCondition",
    "Numerics",
    "Patch",
    "Problem",
    "ProcessVariable",
    "Ref",
    "RemoveFeature",
    "Replace",
    "Requires",
    "RequiresAny",
    "RequiresCapability",
    "RequiresSlot",
    "RunCommand",
    "SavedTensor",
    "SavedTensors",
    "Set",
    "SettingsError",
    "Slot",
    "Stability",
    "Supersedes",
    "Together",
    "Traffic",
    "UnknownValue",
    "VerifyWith",
    "When",
    "World",
    "Wrap",
    "active_feature",
    "condition",
    "feature_ranges",
    "hookimpl",
    "in_backward",
    "is_unpatched",
    "leave",
    "obstacle",
    "report_problem",
    "resized",
    "unset",
    "why_unwritable",
    "with_modules",
    "with_parts",
]
