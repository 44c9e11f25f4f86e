"""Constraints of a feature: requirements, conflicts and order, as data for the resolver."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from mindspeed.plugins.conditions import Condition, ModelCondition, Predicate
from mindspeed.problems import Fixes

AUTO: Final = "auto"
"""The value of a setting that leaves the choice of a feature to mindspeed."""


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a feature in a world, where a choice among several is left to mindspeed.

    The smallest ``amounts`` win, compared in order; they mean the same for all that can hold the slot. ``text`` says them to
    the reader. ``settings`` are those of the feature that the cost holds for, where the user gave none.
    """

    amounts: tuple[float, ...]
    text: str
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)


class Slot:
    """Names of the exclusive roles that built-in features share. A third party may use any other name."""

    CONTEXT_PARALLEL = "context-parallel"
    MOE_DISPATCHER = "moe-dispatcher"
    MOE_LAYER = "moe-layer"
    GROUPED_EXPERTS = "grouped-experts"
    PIPELINE_SCHEDULE = "pipeline-schedule"
    LINEAR = "linear"
    RECOMPUTE_POLICY = "recompute-policy"


SERVED_SIZES: Final[dict[str, str]] = {Slot.CONTEXT_PARALLEL: "cp"}
"""The parallel size that the holder of a slot serves: at size 1 it has nothing to do."""


@dataclass(frozen=True, slots=True)
class Requires:
    """The named feature must be active; it is added, and the plan shows which feature requires it.

    ``settings`` are values that the named feature must have. Another value of the user, or of another requirement, is a
    problem.
    """

    name: str
    reason: str = ""
    when: Predicate | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, init=False)
class RequiresAny:
    """At least one of the named features must be active; never chosen for the user.

    ``fix`` are ways to need none, which are shown in place of the features.
    """

    names: tuple[str, ...]
    reason: str
    when: Predicate | None
    fix: Fixes

    def __init__(self, *names: str, reason: str = "", when: Predicate | None = None, fix: Fixes = ()) -> None:
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "reason", reason)
        object.__setattr__(self, "when", when)
        object.__setattr__(self, "fix", fix)


@dataclass(frozen=True, slots=True)
class RequiresSlot:
    """Some active feature must hold the slot; never chosen for the user, unless ``setting`` is auto.

    ``setting`` is a setting of the declaring feature, ``str | None``. A name makes that feature active, one of another
    distribution too. ``auto`` takes the one with the least `Cost` of those whose own conditions and conflicts hold;
    the plan says which, why, and what the others would cost. None leaves it to the features that are requested. ``fix`` are
    ways to need none.
    """

    slot: str
    reason: str = ""
    when: Predicate | None = None
    setting: str = ""
    fix: Fixes = ()


class Capability:
    """Names of what a holder of a slot may provide (``FeatureSpec.provides``). A third party may use any other name."""

    DOCUMENTS = "documents"
    """Its core attention keeps documents apart whose ends come in the place of a mask."""
    POSITION_BIAS = "position-bias"
    """Its core attention takes a `position_bias`, linear in the distance of query and key."""
    SHARED_MASK = "shared-mask"
    """The holder takes a mask that is not causal from `mindspeed.context_parallel.attention_mask`."""
    PREDICTION_REPORT = "prediction-report"
    """The holder compares steps with a prediction: settings ``predicted_seconds``, and ``prediction``, the file of a search."""
    STEP_COSTS = "step-costs"
    """The feature logs `costs` of each step. Its setting ``file`` names the log of a run of Megatron-LM, which has none."""


@dataclass(frozen=True, slots=True)
class RequiresCapability:
    """A holder of the slot must provide the capability, if a feature holds it. Never chosen for the user."""

    slot: str
    capability: str
    reason: str = ""
    when: Predicate | None = None


@dataclass(frozen=True, slots=True)
class Conflicts:
    """The named feature, or every holder of the named slot, must not be active. Symmetric.

    ``fix`` are settings of the declaring feature that end the conflict.
    """

    name: str
    reason: str = ""
    when: Predicate | None = None
    fix: Fixes = ()


@dataclass(frozen=True, slots=True)
class After:
    """Come later in the plan than the named feature, and than every holder of a slot of that name. Its wraps are outside."""

    name: str
    when: Predicate | None = None


@dataclass(frozen=True, slots=True)
class Before:
    """Come earlier in the plan than the named feature, and than every holder of a slot of that name."""

    name: str
    when: Predicate | None = None


Relation = Requires | RequiresAny | RequiresSlot | RequiresCapability | Conflicts | After | Before
Constraint = Relation | Condition | ModelCondition
