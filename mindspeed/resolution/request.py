"""What was asked for, by source: job file, environment variables, command line, API. Low to high."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

import yaml

from mindspeed.plugins.problems import MindSpeedError, Problem, ResolutionError

JOB_KEYS: Final = ("features", "settings", "world", "level", "platform", "strict", "without", "train")


@dataclass(frozen=True, slots=True)
class Layer:
    """One source of a request. Later layers win; features of all layers add up.

    ``without`` contradicts a feature that is requested; ``disabled`` takes it out of a request that stays as it is.
    """

    source: str
    features: tuple[str, ...] = ()
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    world: Mapping[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    level: int | None = None
    strict: bool | None = None
    platform: str | None = None
    disabled: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class JobFile:
    """A job file: its request, and the ``train`` section that only the trainer reads."""

    layer: Layer
    train: dict[str, Any]


def load_job_file(path: str | Path) -> JobFile:
    """Read a job file (YAML). Raises ResolutionError with MS305 for every unreadable part at once."""
    path = Path(path)
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ResolutionError([Problem("MS305", f"the job file cannot be read: {error}", where=str(path))]) from error
    return job_from_data(data, str(path))


def job_from_data(data: Any, where: str) -> JobFile:
    """Check the shape of a parsed job file. ``where`` names it in problems."""
    if not isinstance(data, dict):
        raise ResolutionError(
            [Problem("MS305", "a job file is a mapping with keys such as features and settings", where=where)]
        )
    problems = [
        Problem("MS305", f"unknown key {key!r} in the job file", where=where, fix=_did_you_mean(str(key), JOB_KEYS))
        for key in data
        if key not in JOB_KEYS
    ]
    shapes: dict[str, tuple[Any, str]] = {
        "features": (list, "a list of names"),
        "without": (list, "a list of names"),
        "settings": (dict, "a mapping of features to settings"),
        "world": (dict, "a mapping of sizes"),
        "train": (dict, "a mapping"),
        "level": (int, "0, 1 or 2"),
        "strict": (bool, "true or false"),
        "platform": (str, "npu, cuda or cpu"),
    }
    for key, (shape, words) in shapes.items():
        if data.get(key) is not None and not isinstance(data[key], shape):
            problems.append(Problem("MS305", f"{key} is {data[key]!r}, not {words}", where=where))
    settings = data.get("settings") or {}
    if isinstance(settings, dict):
        problems += [
            Problem("MS305", f"settings.{name} is {fields!r}, not a mapping of settings", (str(name),), where=where)
            for name, fields in settings.items()
            if not isinstance(fields, dict)
        ]
    if problems:
        raise ResolutionError(problems)
    layer = Layer(
        source="job file",
        features=tuple(map(str, data.get("features") or ())),
        settings=settings,
        world=data.get("world") or {},
        without=tuple(map(str, data.get("without") or ())),
        level=data.get("level"),
        strict=data.get("strict"),
        platform=data.get("platform"),
    )
    return JobFile(layer, data.get("train") or {})


def layer_from_environment(environ: Mapping[str, str]) -> Layer:
    """The layer of ``MINDSPEED_FEATURES=a,b``, ``MINDSPEED_SET='a.size=2;b.mode=x'`` and ``MINDSPEED_STRICT=1``."""
    assignments = [text for text in environ.get("MINDSPEED_SET", "").split(";") if text.strip()]
    return Layer(
        source="environment variable",
        features=split_names(environ.get("MINDSPEED_FEATURES", "")),
        settings=parse_assignments(assignments, "MINDSPEED_SET"),
        without=split_names(environ.get("MINDSPEED_WITHOUT", "")),
        strict=environ.get("MINDSPEED_STRICT", "").lower() in ("1", "true", "yes") or None,
        platform=environ.get("MINDSPEED_PLATFORM") or None,
    )


def split_names(text: str) -> tuple[str, ...]:
    """``"a, b"`` -> ``("a", "b")``."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def parse_assignments(assignments: list[str] | tuple[str, ...], where: str) -> dict[str, dict[str, Any]]:
    """``["feature.field=value"]`` -> ``{feature: {field: value}}``; values are YAML scalars. Raises MS301 for each bad one."""
    settings: dict[str, dict[str, Any]] = {}
    problems = []
    for text in assignments:
        target, equals, value = text.strip().partition("=")
        feature, dot, name = target.strip().partition(".")
        if not (equals and dot and feature and name):
            problems.append(Problem("MS301", f"{text!r} is not of the form feature.field=value", where=where))
            continue
        try:
            settings.setdefault(feature, {})[name] = yaml.safe_load(value)
        except yaml.YAMLError:
            settings.setdefault(feature, {})[name] = value
    if problems:
        raise MindSpeedError(problems)
    return settings


def _did_you_mean(name: str, names: tuple[str, ...]) -> str:
    near = get_close_matches(name, names, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(near)}?" if near else f"known keys: {', '.join(names)}"
