"""Patches of the fake megatron, made short."""

from mindspeed.engine.patching.apply import AppliedPatches, apply
from mindspeed.engine.planning.patch_checks import with_sites
from mindspeed.engine.planning.plan import PlannedPatch
from mindspeed.plugins.patches import Mixin, Patch, Replace, Scalar, Set, Wrap

STATE = "megatron.core.state"
ATTENTION = "megatron.core.transformer.attention"


def planned(owner: str, patch: Patch, ground: bool = False, skipped: str = "") -> PlannedPatch:
    return with_sites([PlannedPatch(owner, patch, patch.target, ground, skipped)])[0]


def replace(target: str, value: str, owner: str = "alpha", ground: bool = False, clears: tuple[str, ...] = ()) -> PlannedPatch:
    return planned(owner, Replace(target, value, "a test", clears=clears), ground)


def wrap(target: str, value: str = "glue:marked", owner: str = "alpha", ground: bool = False) -> PlannedPatch:
    return planned(owner, Wrap(target, value, "a test"), ground)


def mixin(target: str, value: str = "glue:Loud", owner: str = "alpha", ground: bool = False) -> PlannedPatch:
    return planned(owner, Mixin(target, value, "a test"), ground)


def put(target: str, value: Scalar, owner: str = "alpha", ground: bool = False) -> PlannedPatch:
    return planned(owner, Set(target, value, "a test"), ground)


def applied(*patches: PlannedPatch) -> AppliedPatches:
    return apply(patches)
