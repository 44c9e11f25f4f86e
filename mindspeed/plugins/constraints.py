"""What a feature needs, excludes and follows: data that the resolver reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mindspeed.plugins.world import World

Predicate = Callable[[Any, World], bool]
"""``(args, world) -> bool``; reads only the feature's own arguments and the world."""


class Slot:
    """Names of the exclusive roles that built-in features share. A third party may use any other name."""

    CONTEXT_PARALLEL = "context-parallel"
    MOE_DISPATCHER = "moe-dispatcher"
    MOE_LAYER = "moe-layer"
    PIPELINE_SCHEDULE = "pipeline-schedule"
    LINEAR = "linear"
    RECOMPUTE_POLICY = "recompute-policy"


@dataclass(frozen=True, slots=True)
class Requires:
    """The named feature must be active; it is added, and the plan says who asked for it."""

    name: str
    reason: str = ""
    when: Predicate | None = None


@dataclass(frozen=True, slots=True, init=False)
class RequiresAny:
    """At least one of the named features must be active; never chosen for the user."""

    names: tuple[str, ...]
    reason: str
    when: Predicate | None

    def __init__(self, *names: str, reason: str = "", when: Predicate | None = None) -> None:
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "reason", reason)
        object.__setattr__(self, "when", when)


@dataclass(frozen=True, slots=True)
class RequiresSlot:
    """Some active feature must hold the slot; never chosen for the user."""

    slot: str
    reason: str = ""
    when: Predicate | None = None


@dataclass(frozen=True, slots=True)
class Conflicts:
    """The named feature, or every holder of the named slot, must not be active. Symmetric."""

    name: str
    reason: str = ""
    when: Predicate | None = None


@dataclass(frozen=True, slots=True)
class After:
    """Come later in the plan than the named feature, if that is active. Its wraps are then outside."""

    name: str
    when: Predicate | None = None


@dataclass(frozen=True, slots=True)
class Before:
    """Come earlier in the plan than the named feature, if that is active."""

    name: str
    when: Predicate | None = None


@dataclass(frozen=True, slots=True)
class Supersedes:
    """Where both replace one site, this feature's Replace wins over the named feature's, and the plan says so."""

    name: str
    reason: str
    when: Predicate | None = None


@dataclass(frozen=True, slots=True)
class Check:
    """A condition on the feature's own arguments and the world.

    ``message`` and ``fix`` are format strings over ``args`` and ``world``:
    ``"window {args.window} does not divide the context-parallel size {world.cp}"``.
    """

    test: Predicate
    message: str
    fix: str = ""
    when: Predicate | None = None


Constraint = Requires | RequiresAny | RequiresSlot | Conflicts | After | Before | Supersedes | Check
