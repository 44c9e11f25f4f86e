"""Fixes that are possible in a job: the pattern of a hybrid model already decides some of its fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindspeed.job.hybrid_pattern import facts_of_pattern
from mindspeed.job.world import World
from mindspeed.problems.fixes import Advice, Fix, FixStep, GiveField, Together


def possible_fix(fix: Fix | FixStep, world: World) -> Fix:
    """Remove the alternatives that give a field another value than the pattern of a hybrid model."""
    steps = fix if isinstance(fix, tuple) else (fix,)
    if not steps or not world.is_hybrid:
        return steps
    facts = facts_of_pattern(world.hybrid_layer_pattern, world.pp)
    possible = tuple(step for step in steps if not _contradicts(step, facts))
    return possible or (Advice("change the pattern"),)


def _contradicts(step: FixStep, facts: Mapping[str, Any]) -> bool:
    match step:
        case GiveField(name, value):
            return name in facts and facts[name] != value
        case Together(steps):
            return any(_contradicts(part, facts) for part in steps)
    return False
