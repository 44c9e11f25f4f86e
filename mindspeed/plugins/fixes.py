"""Fixes of a problem, as data: each renderer says them in the words of its audience."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class GiveField:
    """Give a field of the job (`mindspeed.job.world`) a value; without one, any value of which ``note`` says more."""

    field: str
    value: Any = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class DropField:
    """Stop giving a field of the job."""

    field: str


@dataclass(frozen=True, slots=True)
class GiveSetting:
    """Give ``feature.setting`` a value; without a dot it is a setting of the declaring feature."""

    setting: str
    value: Any = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class DropSetting:
    """Stop giving ``feature.setting``."""

    setting: str


@dataclass(frozen=True, slots=True)
class AddFeature:
    """Request a feature."""

    name: str


@dataclass(frozen=True, slots=True)
class RemoveFeature:
    """Remove a feature; an empty name is the declaring feature."""

    name: str = ""


@dataclass(frozen=True, slots=True)
class RunCommand:
    """Run a command line."""

    command: str


@dataclass(frozen=True, slots=True)
class Advice:
    """A sentence in the imperative, for what no other fix expresses."""

    text: str


FixStep = GiveField | DropField | GiveSetting | DropSetting | AddFeature | RemoveFeature | RunCommand | Advice
Fix = tuple[FixStep, ...]
"""Alternatives: each of them alone mends the problem."""


def filled(fix: Fix, feature: str, text: Callable[[str], str]) -> Fix:
    """Return a fix in which ``text`` has filled every string, and the declaring ``feature`` every name that is left out."""
    return tuple(_named(_with_texts(step, text), feature) for step in fix)


def _with_texts(step: FixStep, text: Callable[[str], str]) -> FixStep:
    values: dict[str, Any] = {f.name: getattr(step, f.name) for f in fields(step)}
    return type(step)(**{name: text(value) if isinstance(value, str) else value for name, value in values.items()})


def _named(step: FixStep, feature: str) -> FixStep:
    if isinstance(step, RemoveFeature) and not step.name:
        return replace(step, name=feature)
    if isinstance(step, GiveSetting | DropSetting) and "." not in step.setting:
        return replace(step, setting=f"{feature}.{step.setting}")
    return step


def on_command_line(fix: Fix) -> str:
    """Return a fix in the options of mindspeed's command line, alternatives joined by "or"."""
    return ", or ".join(map(_on_command_line, fix))


def _on_command_line(step: FixStep) -> str:
    match step:
        case GiveField(field, value, note):
            return _with_note(_option(field, value), note)
        case DropField(field):
            return f"drop --{field.replace('_', '-')}"
        case GiveSetting(setting, value, note):
            return _with_note(f"--set {setting}={'VALUE' if value is None else value}", note)
        case DropSetting(setting):
            return f"drop {setting}"
        case AddFeature(name):
            return f"add {name} to the features"
        case RemoveFeature(name):
            return f"remove {name}"
        case RunCommand(command):
            return command
        case Advice(text):
            return text


def _option(field: str, value: Any) -> str:
    option = field.replace("_", "-")
    if isinstance(value, bool):
        return f"--{option}" if value else f"--no-{option}"
    return f"--{option} {'N' if value is None else value}"


def _with_note(text: str, note: str) -> str:
    return f"{text} ({note})" if note else text
