"""Merge of the options that several features choose for one process group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mindspeed.plugins.problems import MindSpeedError, Problem

Fields = dict[tuple[str, ...], Any]
"""The fields of an options object by their path: ``("config", "max_ctas")``."""


def merged_options(group: str, answers: Sequence[tuple[str, Any]]) -> Any:
    """Return one options object with the fields that each feature has set; ``answers`` are ``(feature, options)``.

    A field counts as set where it differs from a new object of its class. Raises MS402 for each field that two features set
    to different values, and for options of two classes.
    """
    (first, merged), *others = answers
    owners: dict[tuple[str, ...], str] = dict.fromkeys(_set_fields(merged), first)
    problems = []
    for feature, options in others:
        if type(options) is not type(merged):
            values = f"{first} gives {type(merged).__name__}, {feature} gives {type(options).__name__}"
            problems.append(_disagreement(group, "", (first, feature), values))
            continue
        for path, value in _set_fields(options).items():
            owner = owners.setdefault(path, feature)
            if owner == feature:
                _put(merged, path, value)
            elif (before := _get(merged, path)) != value:
                values = f"{owner} sets {before!r}, {feature} sets {value!r}"
                problems.append(_disagreement(group, ".".join(path), (owner, feature), values))
    if problems:
        raise MindSpeedError(problems)
    return merged


def _disagreement(group: str, field: str, features: tuple[str, ...], values: str) -> Problem:
    text = f"the options {field} of process group {group} cannot have two values: {values}".replace("  ", " ")
    return Problem("MS402", text, features, fix=f"remove {' or '.join(features)}")


def _set_fields(options: Any) -> Fields:
    """Return the fields that differ from a new object of the same class; all of them where none can be made."""
    if isinstance(options, dict):
        return {(str(key),): value for key, value in options.items()}
    try:
        default: Fields = dict(_fields(type(options)()))
    except TypeError:
        default = {}
    return {path: value for path, value in _fields(options) if path not in default or default[path] != value}


def _fields(options: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the public fields of an options object, down to plain values."""
    for name in dir(options):
        if name.startswith("_") or callable(value := getattr(options, name, None)):
            continue
        if isinstance(value, str | int | float | bool | list | tuple | type(None)) or path:
            yield (*path, name), value
        else:
            nested = list(_fields(value, (*path, name)))
            yield from nested or [((*path, name), value)]


def _get(options: Any, path: tuple[str, ...]) -> Any:
    if isinstance(options, dict):
        return options[path[0]]
    for name in path:
        options = getattr(options, name)
    return options


def _put(options: Any, path: tuple[str, ...], value: Any) -> None:
    if isinstance(options, dict):
        options[path[0]] = value
    else:
        setattr(_get(options, path[:-1]), path[-1], value)
