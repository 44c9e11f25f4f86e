"""Ask a feature's plan and planner hooks before it is active, for given arguments and a given job. Light."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Final

from mindspeed.job.config import world_of_attributes
from mindspeed.job.fields import FIELDS
from mindspeed.job.world import UnknownValue, World
from mindspeed.plugins.feature import Feature
from mindspeed.plugins.saved_tensors import SavedTensors

_FORMER_FIELDS: Final = {
    "saved_tensors": "saved",
    "resting": "resting",
    "estimate": "estimate",
    "cost": "cost",
    "notes": "notes",
    "layer_split": "layer_split",
    "job_values": "model",
    "process_variables": "variables",
    "working_steps": "steps",
}


def implements(feature: type[Feature[Any]], hook: str) -> bool:
    """Return whether a feature class has a method for a hook."""
    return hasattr(feature, hook) or bool(getattr(feature.spec, _FORMER_FIELDS.get(hook, hook), None))


def answer(feature: type[Feature[Any]], hook: str, args: Any, world: Any, **given: Any) -> Any:
    """Return what a feature with these arguments, in this job, answers to a hook; None where it does not implement it.

    Raises whatever the hook raises, `UnknownValue` for a value that nobody gave.
    """
    method = getattr(feature, hook, None)
    if method is not None:
        return method(feature(args, world), **given)
    former = getattr(feature.spec, _FORMER_FIELDS.get(hook, hook), None)
    match hook:
        case "variants":
            return None if former is None else former(world)
        case "budget":
            return (former, getattr(args, former)) if former and getattr(args, former) is not None else None
        case "process_variables":
            return former
        case "working_steps":
            return None if former is None else former(args)
    return None if former is None else former(args, world, *given.values())


def changed_tensors(feature: type[Feature[Any]], hook: str, args: Any, world: Any) -> Callable[[SavedTensors], SavedTensors]:
    """Return the change of what layers or the optimizer keep that a feature declares in ``saved_tensors`` or ``resting``."""

    def change(tensors: SavedTensors) -> SavedTensors:
        if feature.spec.is_idle(world):
            return tensors
        changed: SavedTensors | None = answer(feature, hook, args, world, tensors=tensors)
        return tensors if changed is None else changed

    return change


def completed(world: World, features: Iterable[tuple[type[Feature[Any]], Any]]) -> World:
    """Return the world with what these features, each with its arguments, say of the job: values nobody gave, layer splits.

    What a feature says that reads a value nobody gave stays out.
    """
    for feature, args in features:
        with suppress(UnknownValue):
            values = _of_arguments(feature, args, world) | dict(answer(feature, "job_values", args, world) or {})
            given = world.known()
            added = {field: value for field, value in values.items() if not given.get(field)}
            world = World(given | added, world.layer_split) if added else world
            split = answer(feature, "layer_split", args, world)
            world = World(world.known(), split) if split else world
    return world


def _of_arguments(feature: type[Feature[Any]], args: Any, world: World) -> dict[str, Any]:
    """Return the values of the world that a feature's arguments of Megatron give, those that it sets in every configuration."""
    with suppress(UnknownValue):
        overrides = answer(feature, "megatron_args", args, world) or ()
        if not overrides:
            return {}
        given = world_of_attributes({override.argument: override.value for override in overrides if override.only is None})
        return {name: value for name, value in given.items() if FIELDS[name].has_default and value != FIELDS[name].default}
    return {}
