"""Layers of a request by source, low to high: job file, environment variables, command line, API."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from mindspeed.engine.resolution.planned_feature import PlanNote
from mindspeed.engine.resolution.variables import unknown_variables, value_problems
from mindspeed.problems import Fix, MindSpeedError, Problem, ResolutionError, brief, marked, near_names, suggestion

MEGATRON_DEFAULTS: Final = "Megatron's defaults"
"""Source of values that are only defaults of Megatron-LM's parser."""
JOB_KEYS: Final = ("features", "settings", "world", "level", "platform", "strict", "only", "without", "train")


@dataclass(frozen=True, slots=True)
class Layer:
    """A source of a request. Later layers win; features of all layers add up.

    With ``only`` optimization level 1 adds nothing. ``without`` contradicts a feature that is requested; ``disabled`` removes
    it from a request that is kept otherwise. ``notes`` become rows of the plan. ``option`` is the argument of Megatron-LM that
    the layer was read from. ``problems`` are those of the source that leave the rest readable; they end the resolution.
    """

    source: str
    features: tuple[str, ...] = ()
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    world: Mapping[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    level: int | None = None
    strict: bool | None = None
    only: bool | None = None
    platform: str | None = None
    disabled: tuple[str, ...] = ()
    notes: tuple[PlanNote, ...] = ()
    option: str = ""
    problems: tuple[Problem, ...] = ()


@dataclass(frozen=True, slots=True)
class JobFile:
    """A job file: its request, and the ``train`` section that only the trainer reads."""

    layer: Layer
    train: dict[str, Any]


def job_from_data(data: Any, where: str) -> JobFile:
    """Check the shape of a parsed job file. ``where`` names it in problems."""
    if not isinstance(data, dict):
        text, fix = "a job file must be a mapping with keys such as features and settings", Fix.advise("features: [NAME, ...]")
        raise ResolutionError([Problem("MS305", text, where=where, fix=fix)])
    unknown = []
    for key in data:
        if key not in JOB_KEYS:
            fix = Fix.advise(suggestion(near_names(key, JOB_KEYS), f"use one of the keys {', '.join(JOB_KEYS)}"))
            unknown.append(Problem("MS305", f"unknown key {key!r} in the job file", where=where, fix=fix))
    data = {key: value for key, value in data.items() if key in JOB_KEYS}
    problems = _shape_problems(data, "MS305", where)
    if not problems:
        data, problems = _with_spelled_names(data, where)
    if problems:
        raise ResolutionError([*unknown, *problems])
    return JobFile(replace(_layer(data, marked("job file")), problems=tuple(unknown)), data.get("train") or {})


def spelled(name: str) -> str:
    """Return the spelling of a feature name: lower case, words joined by dashes, so that ``Ring_Attention`` is a name too."""
    return name.replace("_", "-").lower()


def _with_spelled_names(data: Mapping[str, Any], where: str) -> tuple[dict[str, Any], list[Problem]]:
    """Return a job file in which features are spelled as they are declared, and a problem for each with two settings."""
    lists = {key: [*map(spelled, data[key])] for key in ("features", "without") if data.get(key)}
    settings: dict[str, Any] = {}
    problems = []
    for name, values in (data.get("settings") or {}).items():
        if (known := spelled(str(name))) in settings:
            fix = Fix.advise(f"put all settings of {known} under one key")
            problems.append(Problem("MS305", f"settings has {known} twice, once as {name}", (known,), where=where, fix=fix))
        settings[known] = values
    return {**data, **lists, **({"settings": settings} if settings else {})}, problems


def layer_from_call(**arguments: Any) -> Layer:
    """The layer of the arguments of ``mindspeed.plan``. Raises ResolutionError with MS301 for every one of a wrong type."""
    data = {name: _listed(value) if name in ("features", "without") else value for name, value in arguments.items()}
    if problems := _shape_problems(data, "MS301", "mindspeed.plan"):
        raise ResolutionError(problems)
    return _layer(data, "API")


def _listed(value: Any) -> Any:
    """Any collection of names as a list; a string is none."""
    return list(value) if isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping) else value


_SHAPES: Final[Mapping[str, tuple[Any, str]]] = {
    "features": (list, "a list of names"),
    "without": (list, "a list of names"),
    "settings": (Mapping, "a mapping of features to settings"),
    "world": (Mapping, "a mapping of world fields"),
    "train": (Mapping, "a mapping"),
    "level": (int, "0, 1 or 2"),
    "strict": (bool, "true or false"),
    "only": (bool, "true or false"),
    "platform": (str, "npu, cuda or cpu"),
}


def _shape_problems(data: Mapping[str, Any], code: str, where: str) -> list[Problem]:
    """A problem for every part of a request that has another shape than the resolver reads."""
    problems = []
    for key, (shape, words) in _SHAPES.items():
        value = data.get(key)
        if value is not None and not isinstance(value, shape):
            problems.append(
                Problem(code, f"{key} is {brief(value)}, not {words}", where=where, fix=Fix.advise(f"give {key} as {words}"))
            )
        elif shape is list:
            names = value or ()
            problems += [
                Problem(
                    code,
                    f"the list '{key}' contains {brief(name)}, but must contain only names of features",
                    where=where,
                    fix=Fix.advise(f"give '{key}' as {words} that mindspeed features list prints"),
                )
                for name in names
                if type(name) is not str
            ]
    settings = data.get("settings")
    for name, fields in settings.items() if isinstance(settings, Mapping) else ():
        if not isinstance(fields, Mapping):
            text, fix = (
                f"settings.{name} is {brief(fields)}, not a mapping of settings",
                Fix.advise(f"give each value with the name of its setting, as in settings: {{{name}: {{SETTING: VALUE}}}}"),
            )
            problems.append(Problem(code, text, (str(name),), where=where, fix=fix))
    return problems


def _layer(data: Mapping[str, Any], source: str) -> Layer:
    given: dict[str, Any] = {key: value for key, value in data.items() if key != "train" and value is not None}
    given |= {key: tuple(value) for key, value in given.items() if isinstance(value, list)}
    return Layer(source, **given)


def layer_from_environment(environ: Mapping[str, str]) -> Layer:
    """The layer of ``MINDSPEED_FEATURES=a,b``, ``MINDSPEED_SET='a.size=2;b.mode=x'`` and ``MINDSPEED_STRICT=1``.

    Raises MindSpeedError with MS301 for every variable of ours whose value means nothing; misspelt ones are notes.
    """
    if problems := value_problems(environ):
        raise MindSpeedError(problems)
    assignments = [text for text in environ.get("MINDSPEED_SET", "").split(";") if text.strip()]
    return Layer(
        source="environment variable",
        features=split_names(environ.get("MINDSPEED_FEATURES", "")),
        settings=parse_assignments(assignments, "MINDSPEED_SET"),
        without=split_names(environ.get("MINDSPEED_WITHOUT", "")),
        strict=environ.get("MINDSPEED_STRICT", "").lower() in ("1", "true", "yes") or None,
        platform=environ.get("MINDSPEED_PLATFORM") or None,
        notes=unknown_variables(environ),
    )


def split_names(text: str) -> tuple[str, ...]:
    """Split names at commas and spaces: ``"a, b c"`` -> ``("a", "b", "c")``."""
    return tuple(text.replace(",", " ").split())


def parse_assignments(assignments: list[str] | tuple[str, ...], where: str) -> dict[str, dict[str, Any]]:
    """``["feature.field=value"]`` -> ``{feature: {field: value}}``; values are YAML scalars. Raises MS301 for each
    bad one and MS303 for one that is given twice and differently.
    """
    settings: dict[str, dict[str, Any]] = {}
    problems = []
    for text in assignments:
        target, equals, value = text.strip().partition("=")
        feature, dot, name = target.strip().partition(".")
        if not (equals and dot and feature and name):
            example = Fix.advise(f"{where}{' ' if where.startswith('-') else '='}FEATURE.SETTING=VALUE")
            text = f"{brief(text)} does not have the form feature.field=value"
            problems.append(Problem("MS301", text, where=where, fix=example))
            continue
        fields = settings.setdefault(feature, {})
        parsed = _scalar(value)
        if name in fields and fields[name] != parsed:
            text = f"{feature}.{name} is given twice: {brief(fields[name])} and {brief(parsed)}"
            problems.append(Problem("MS303", text, (feature,), where=where, fix=Fix.advise("keep one of them")))
        fields[name] = parsed
    if problems:
        raise MindSpeedError(problems)
    return settings


def _scalar(text: str) -> Any:
    from mindspeed.files.plain_yaml import PlainDataError, read_plain

    try:
        return read_plain(text)
    except PlainDataError:
        return text
