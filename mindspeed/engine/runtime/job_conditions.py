"""Ask the conditions of the active features about the job that this process really builds.

The plan has asked the same conditions about what was known before the launch; arguments that Megatron-LM has parsed and the
configuration of a model say the rest.
"""

from __future__ import annotations

import os
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from mindspeed.engine.runtime import session
from mindspeed.plugins import Feature, Fix, Fixes, MindSpeedError, Problem, Requires, UnknownValue, World, report_problem
from mindspeed.plugins.conditions import ConditionError, ModelCondition, conditions, failure
from mindspeed.problems import filled

Wrong = tuple[Feature[Any], str, Fixes]
"""A feature, the sentence that says what it cannot run with, and the fix."""


def features_without(facts: Mapping[str, Any]) -> frozenset[str]:
    """Ask every condition about the job with these ``facts``, fields of a World, in place of what the plan knew.

    Returns the features that have nothing to do with such a model, and those that level 1 alone switched on and that step
    aside, with MS413. Raises MindSpeedError with an MS304 for each requested feature that cannot run so.
    """
    others = _for_others(_features(), facts)
    concerned = [feature for feature in _features() if feature.spec.name not in others]
    return others | _decided(_failures(concerned, facts))


def _features() -> Sequence[Feature[Any]]:
    """Return the features of the active plan."""
    active = session.current()
    return active.manager.features if active is not None else ()


def _for_others(features: Iterable[Feature[Any]], facts: Mapping[str, Any]) -> frozenset[str]:
    """Return the features that work on other models than the one with these facts, and those that require them."""
    names: set[str] = set()
    for feature in features:  # a required feature comes before those that require it
        required = {constraint.name for constraint in feature.spec.constraints if isinstance(constraint, Requires)}
        if required & names or _is_for_others(feature, facts):
            names.add(feature.spec.name)
    return frozenset(names)


def _is_for_others(feature: Feature[Any], facts: Mapping[str, Any]) -> bool:
    """Return whether a feature works on other models than the one with these facts."""
    job = World(feature.world.known() | dict(facts))
    selecting = [condition for condition in conditions(feature.spec.constraints) if condition.selects]
    try:
        return any(failure(condition, feature.spec.name, feature.args, job) for condition in selecting)
    except UnknownValue:
        return False


def refusals(facts: Mapping[str, Any], features: Sequence[Feature[Any]] | None = None) -> list[Problem]:
    """Return an MS304 for each requested feature, of the active plan or of those given, that cannot run with ``facts``."""
    failures = _failures(_features() if features is None else features, facts)
    return list(dict.fromkeys(_refusal(*wrong) for wrong in failures if wrong[0].requested))


def features_without_model(subject: str, *found: Any) -> frozenset[str]:
    """Ask the conditions that only a live object can decide: ``subject`` names its kind, ``found`` are the objects."""
    return _decided(_model_failures(_features(), subject, found))


def _failures(features: Iterable[Feature[Any]], facts: Mapping[str, Any]) -> Iterator[Wrong]:
    arguments = {feature.spec.name: feature.args for feature in features}
    for feature in features:
        name, world = feature.spec.name, feature.world
        job = World(world.known() | dict(facts), world.layer_split)
        for condition in conditions(feature.spec.constraints):
            if condition.otherwise != "refuse" or (condition.of and condition.of not in arguments):
                continue
            try:
                wrong = failure(condition, name, feature.args, job, arguments.get(condition.of))
            except UnknownValue:
                continue
            except ConditionError as error:
                text = f"the condition {condition.name} of {name} {error}"
                fix = Fix.advise("report it to the authors of the feature")
                raise MindSpeedError([Problem("MS107", text, (name,), where=condition.where, fix=fix)]) from error
            if wrong is not None:
                yield feature, wrong.message, wrong.fix


def _model_failures(features: Iterable[Feature[Any]], subject: str, found: tuple[Any, ...]) -> Iterator[Wrong]:
    for feature in features:
        for condition in feature.spec.constraints:
            if not isinstance(condition, ModelCondition) or condition.subject != subject:
                continue
            if condition.when is not None and not condition.when(feature.args, feature.world):
                continue
            function: Callable[..., Iterable[str]] = pkgutil.resolve_name(condition.function)
            fix = filled(condition.fix, feature.spec.name, str)
            yield from ((feature, text, fix) for text in function(feature, *found))


def _decided(wrong: Iterable[Wrong]) -> frozenset[str]:
    """Raise for requested features, report the others and return their names."""
    problems, aside = [], set()
    for feature, text, fix in wrong:
        name = feature.spec.name
        if feature.requested:
            problems.append(_refusal(feature, text, fix))
        elif name not in aside:
            aside.add(name)
            report_step_aside(name, text)
    if problems:
        raise MindSpeedError(dict.fromkeys(problems))
    return frozenset(aside)


def _refusal(feature: Feature[Any], text: str, fix: Fixes) -> Problem:
    name = feature.spec.name
    return Problem("MS304", f"{name}: {text}", (name,), fix=fix or Fix.remove_feature(name))


def report_step_aside(name: str, text: str) -> None:
    """Report MS413: a feature that level 1 alone switched on leaves a part as Megatron has it."""
    problem = Problem(
        "MS413", f"{name}: {text}; this part of the model is unchanged", (name,), fix=Fix.give_option("--without", name)
    )
    report_problem(problem, log=os.environ.get("RANK", "0") == "0")
