"""Every name that a feature author imports; `mindspeed.plugins` hands them out.

Each is imported ``as`` itself, which makes it public for type checkers.
"""

from pydantic import Field as Field

from mindspeed.job.world import UnknownValue as UnknownValue
from mindspeed.job.world import World as World
from mindspeed.plugins.active import active_feature as active_feature
from mindspeed.plugins.active import report_problem as report_problem
from mindspeed.plugins.conditions import Condition as Condition
from mindspeed.plugins.conditions import ModelCondition as ModelCondition
from mindspeed.plugins.conditions import condition as condition
from mindspeed.plugins.constraints import After as After
from mindspeed.plugins.constraints import Before as Before
from mindspeed.plugins.constraints import Capability as Capability
from mindspeed.plugins.constraints import Conflicts as Conflicts
from mindspeed.plugins.constraints import Cost as Cost
from mindspeed.plugins.constraints import Requires as Requires
from mindspeed.plugins.constraints import RequiresAny as RequiresAny
from mindspeed.plugins.constraints import RequiresCapability as RequiresCapability
from mindspeed.plugins.constraints import RequiresSlot as RequiresSlot
from mindspeed.plugins.constraints import Slot as Slot
from mindspeed.plugins.estimates import Estimate as Estimate
from mindspeed.plugins.estimates import Traffic as Traffic
from mindspeed.plugins.feature import Category as Category
from mindspeed.plugins.feature import CheckpointState as CheckpointState
from mindspeed.plugins.feature import Feature as Feature
from mindspeed.plugins.feature import FeatureArgs as FeatureArgs
from mindspeed.plugins.feature import FeatureSpec as FeatureSpec
from mindspeed.plugins.feature import MegatronFlag as MegatronFlag
from mindspeed.plugins.feature import Numerics as Numerics
from mindspeed.plugins.feature import Stability as Stability
from mindspeed.plugins.feature import VerifyWith as VerifyWith
from mindspeed.plugins.hookspecs import hookimpl as hookimpl
from mindspeed.plugins.patches import ArgOverride as ArgOverride
from mindspeed.plugins.patches import Mixin as Mixin
from mindspeed.plugins.patches import Patch as Patch
from mindspeed.plugins.patches import Ref as Ref
from mindspeed.plugins.patches import Replace as Replace
from mindspeed.plugins.patches import Set as Set
from mindspeed.plugins.patches import When as When
from mindspeed.plugins.patches import Wrap as Wrap
from mindspeed.problems import Fix as Fix
from mindspeed.problems import Fixes as Fixes
from mindspeed.problems import GivenValue as GivenValue
from mindspeed.problems import MindSpeedError as MindSpeedError
from mindspeed.problems import Problem as Problem
from mindspeed.problems import SettingsError as SettingsError
