"""Ask a feature's plan and planner hooks before it is active, for given arguments and a given job. Light."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from typing import Any, Final

from mindspeed.job.config import world_of_attributes
from mindspeed.job.fields import FIELDS
from mindspeed.job.world import UnknownValue, World
from mindspeed.plugins.feature import Feature
from mindspeed.plugins.hook_answers import asked, wrong_answer
from mindspeed.plugins.saved_tensors import SavedTensors
from mindspeed.problems.problem import MindSpeedError

Contribution = tuple[tuple[str, Any], ...]
"""Fields of the job that active features set, and `LAYER_SPLIT`."""
LAYER_SPLIT: Final = "layer_split"


def implements(feature: type[Feature[Any]], hook: str) -> bool:
    """Return whether a feature class has a method for a hook."""
    return hasattr(feature, hook)


def answer(feature: type[Feature[Any]], hook: str, args: Any, world: Any, **given: Any) -> Any:
    """Return what a feature with these arguments, in this job, returns from a hook; None where it does not implement it."""
    if not implements(feature, hook):
        return None
    return asked(hook, feature, lambda: getattr(feature, hook)(feature(args, world), **given))


def changed_tensors(feature: type[Feature[Any]], hook: str, args: Any, world: Any) -> Callable[[SavedTensors], SavedTensors]:
    """Return the change of what layers or the optimizer keep that a feature declares in ``saved_tensors`` or ``resting``."""

    def change(tensors: SavedTensors) -> SavedTensors:
        if feature.spec.is_idle(world):
            return tensors
        changed: SavedTensors | None = answer(feature, hook, args, world, tensors=tensors)
        return tensors if changed is None else changed

    return change


def contribution(world: World, feature: type[Feature[Any]], args: Any, given: Collection[str] = ()) -> Contribution:
    """Return what one active feature gives to a job: values that are not set, arguments that it sets, layers of each chunk.

    The fields ``given`` are the user's and stay as they are. Arguments count where Megatron has a default for every job. What
    a feature says that reads a value nobody gave stays out.
    """
    if feature.spec.is_idle(world):
        return ()
    made = {name: value for name, value in _of_arguments(world, feature, args).items() if name not in given}
    with suppress(UnknownValue):
        values = answer(feature, "job_values", args, world) or {}
        if unknown := sorted(map(str, values.keys() - FIELDS.keys())):
            text = f"returns {', '.join(unknown)}, which is not a field of a job"
            raise MindSpeedError([wrong_answer("job_values", feature, text)])
        made |= {name: value for name, value in values.items() if not world.is_set(name)}
    changed = {name: value for name, value in made.items() if not (world.knows(name) and getattr(world, name) == value)}
    with suppress(UnknownValue):
        if split := answer(feature, "layer_split", args, world):
            changed[LAYER_SPLIT] = tuple(split)
    return tuple(changed.items())


def contradictions(world: World, feature: type[Feature[Any]], args: Any, given: Collection[str]) -> Contribution:
    """Return the fields ``given`` by the user that an active feature's arguments of Megatron set to other values."""
    if feature.spec.is_idle(world):
        return ()
    values = _of_arguments(world, feature, args)
    return tuple((name, value) for name, value in values.items() if name in given and getattr(world, name) != value)


def _of_arguments(world: World, feature: type[Feature[Any]], args: Any) -> dict[str, Any]:
    """Return the fields of the job, of those with a default of Megatron, that a feature's arguments of Megatron set."""
    with suppress(UnknownValue):
        if not (overrides := answer(feature, "megatron_args", args, world)):
            return {}
        values = world_of_attributes({override.argument: override.value for override in overrides if override.only is None})
        return {name: value for name, value in values.items() if FIELDS[name].has_default}
    return {}


def with_contribution(world: World, contribution: Contribution) -> World:
    """Return a job with what features add to it."""
    if not contribution:
        return world
    values = dict(contribution)
    split = values.pop(LAYER_SPLIT, world.layer_split)
    return World(world.known() | values, split)


def completed(world: World, features: Iterable[tuple[type[Feature[Any]], Any]]) -> World:
    """Return the job with what these active features, each with its arguments, make of it."""
    added = (pair for feature, args in features for pair in contribution(world, feature, args))
    return with_contribution(world, tuple(added))
