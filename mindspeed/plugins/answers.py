"""Ask a feature's plan and planner hooks before it is active, for given arguments and a given job. Light."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from functools import cache
from traceback import extract_tb
from typing import Any, Final, get_type_hints

from mindspeed.job.config import world_of_attributes
from mindspeed.job.fields import FIELDS
from mindspeed.job.world import Signal, UnknownValue, World
from mindspeed.plugins import hookspecs
from mindspeed.plugins.declared_types import Test, test_of, words_of
from mindspeed.plugins.feature import Feature
from mindspeed.plugins.saved_tensors import SavedTensors
from mindspeed.problems import Fix, MindSpeedError, Problem, brief
from mindspeed.process.providers import provider_of
from mindspeed.process.tracing import trace_error
from mindspeed.process.watchdog import RUNNING, is_watched

_PLUGINS: Final = os.path.join(os.path.dirname(__file__), "")


def asked(hook: str, feature: Any, ask: Callable[[], Any]) -> Any:
    """Return the result of a hook of a feature.

    Raises MindSpeedError: MS901 for an exception in the hook, MS108 for an answer of another type than the hook has.
    """
    RUNNING.append((hook, feature))  # as `running` does, which takes three times as long
    try:
        answer = ask()
    except (MindSpeedError, Signal):
        raise
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) or not (isinstance(error, Exception) or is_watched()):
            raise
        trace_error(error)
        raise MindSpeedError([_failure(hook, feature, error)]) from error
    finally:
        RUNNING.pop()
    fits, words = _type_of(hook)
    if not fits(answer):
        raise MindSpeedError([wrong_answer(hook, feature, f"returns {brief(answer)}, not {words}")])
    return answer


@cache
def _type_of(hook: str) -> tuple[Test, str]:
    """A test for the answers of a hook, from the specification, and the type in words."""
    from mindspeed.plugins import constraints, estimates, patches, saved_tensors
    from mindspeed.process import variables

    names = {
        name: value
        for module in (constraints, estimates, patches, variables, saved_tensors)
        for name, value in vars(module).items()
    }
    specification = next(getattr(hooks, hook) for hooks in hookspecs.HOOK_CLASSES if hasattr(hooks, hook))
    hint = get_type_hints(specification, localns=names)["return"]
    return (lambda answer: True, "anything") if hint is type(None) else (test_of(hint), words_of(hint))


def wrong_answer(hook: str, feature: Any, what: str) -> Problem:
    """MS108 for a hook of a feature that returns an unsupported value."""
    name, code = feature.spec.name, inspect.unwrap(getattr(feature, hook)).__code__
    author = provider_of(feature) or f"the feature {name}"
    where = _where(feature, f"{code.co_filename}:{code.co_firstlineno}")
    fix = Fix.advise(f"report it to the authors of {author}")
    return Problem("MS108", f"hook {hook} of feature {name} {what}", (name,), where=where, fix=fix)


def _failure(hook: str, feature: Any, error: BaseException) -> Problem:
    """MS901 for an exception in a hook: the feature, the line of the hook, and the line that raised."""
    name, lines = feature.spec.name, [f"{frame.filename}:{frame.lineno}" for frame in extract_tb(error.__traceback__)]
    lines = [line for line in lines if not line.startswith(_PLUGINS)]
    where = _where(feature, f"{lines[0]}, raised at {lines[-1]}" if len(lines) > 1 else "".join(lines))
    text = f"{type(error).__name__}: {error}, raised by the hook '{hook}' of feature {name}"
    fix = Fix.advise("remove the feature, or report the error to its authors with the traceback that MINDSPEED_TRACE=1 prints")
    return Problem("MS901", text, (name,), where=where, fix=fix)


def _where(feature: Any, line: str) -> str:
    return ", ".join(filter(None, (provider_of(feature), line)))


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
    """Return what one active feature gives to a job: values that are not set, and arguments that it sets.

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
    return tuple(changed.items())


def split_layers(world: World, feature: type[Feature[Any]], args: Any) -> Contribution:
    """Return the layers of each chunk that an active feature gives to a job, which has the contributions of all features."""
    with suppress(UnknownValue):
        if not feature.spec.is_idle(world) and (split := answer(feature, "layer_split", args, world)):
            return ((LAYER_SPLIT, tuple(split)),)
    return ()


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
    active = tuple(features)
    for question in (contribution, split_layers):
        world = with_contribution(world, tuple(pair for feature, args in active for pair in question(world, feature, args)))
    return world
