"""Fixes of a problem, as data: each renderer formats them for its audience."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from dataclasses import field as declared
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class GiveField:
    """Give a field of the job (`mindspeed.job.fields`) a value, or a greater one with ``or_more``.

    Without a value it is any, of which ``note`` says more.
    """

    field: str
    value: Any = declared(default=None, hash=False)
    note: str = ""
    or_more: bool = False


@dataclass(frozen=True, slots=True)
class DropField:
    """Stop giving a field of the job, in its ``source`` where that is not the command line."""

    field: str
    source: str = ""


@dataclass(frozen=True, slots=True)
class GiveSetting:
    """Give ``feature.setting`` a value; without a dot it is a setting of the declaring feature."""

    setting: str
    value: Any = declared(default=None, hash=False)
    note: str = ""


@dataclass(frozen=True, slots=True)
class DropSetting:
    """Stop giving ``feature.setting``."""

    setting: str


@dataclass(frozen=True, slots=True)
class GiveOption:
    """Give a command an option that is neither a field of the job nor a setting, with a value or as a switch (True)."""

    option: str
    value: Any = declared(default=True, hash=False)
    note: str = ""


@dataclass(frozen=True, slots=True)
class DropOption:
    """Remove an option from a command."""

    option: str


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


@dataclass(frozen=True, slots=True)
class Together:
    """Several steps of which none alone mends the problem."""

    steps: tuple[FixStep, ...]


FixStep = (
    GiveField
    | DropField
    | GiveSetting
    | DropSetting
    | GiveOption
    | DropOption
    | AddFeature
    | RemoveFeature
    | RunCommand
    | Advice
    | Together
)
Fix = tuple[FixStep, ...]
"""Alternatives: each of them alone mends the problem."""


class SettingsError(ValueError):
    """The error that a validator of an argument model raises: contradicting settings, and the fix."""

    def __init__(self, text: str, *fix: FixStep) -> None:
        super().__init__(text)
        self.fix: Fix = fix


KINDS: Final[Mapping[str, type[Any]]] = {
    re.sub(r"(?<=[a-z])(?=[A-Z])", "-", kind.__name__).lower(): kind for kind in FixStep.__args__
}
"""Name of every kind of step in JSON (``give-field``), and its class."""
_SHELL: Final = re.compile(r"[\s'\"\[\](){}$&|;<>\\`]")
"""Characters that a shell does not hand on as they are."""
_NOT_PLAIN: Final = re.compile(r"^$|^[~#&*!|>%@`]|: | #|:$")
"""Texts that YAML reads as something else, unless they are quoted."""
_KIND_OF: Final = {kind: name for name, kind in KINDS.items()}


def advice(text: str) -> Fix:
    """Return a sentence as the fix; none where there is nothing to say."""
    return (Advice(text),) if text else ()


def filled(fix: Fix, feature: str, text: Callable[[str], str]) -> Fix:
    """Return a fix in which ``text`` has filled every string, and the declaring ``feature`` every missing name."""
    return tuple(_filled(step, feature, text) for step in fix)


def _filled(step: FixStep, feature: str, text: Callable[[str], str]) -> FixStep:
    if isinstance(step, Together):
        return Together(filled(step.steps, feature, text))
    values: dict[str, Any] = {f.name: getattr(step, f.name) for f in fields(step)}
    values = {name: text(value) if isinstance(value, str) else value for name, value in values.items()}
    if isinstance(step, RemoveFeature):
        values["name"] = values["name"] or feature
    elif isinstance(step, GiveSetting | DropSetting) and "." not in step.setting:
        values["setting"] = f"{feature}.{values['setting']}"
    return type(step)(**values)


def named_in(fix: Fix) -> Iterator[str]:
    """Yield the fields of the job and the settings that a fix gives or drops."""
    for step in fix:
        match step:
            case GiveField(name) | DropField(name) | GiveSetting(name) | DropSetting(name):
                yield name
            case Together(steps):
                yield from named_in(steps)


def fix_to_json(fix: Fix) -> list[dict[str, Any]]:
    """Return the steps of a fix as JSON objects with a ``kind``."""
    return [
        {"kind": _KIND_OF[type(step)], "steps": fix_to_json(step.steps)}
        if isinstance(step, Together)
        else {"kind": _KIND_OF[type(step)], **asdict(step)}
        for step in fix
    ]


def fix_from_json(rows: list[dict[str, Any]]) -> Fix:
    """Inverse of `fix_to_json`."""
    steps = []
    for row in rows:
        values = {name: value for name, value in row.items() if name != "kind"}
        values |= {"steps": fix_from_json(row["steps"])} if "steps" in row else {}
        steps.append(KINDS[row["kind"]](**values))
    return tuple(steps)


class CommandLine:
    """Say fixes in the options of mindspeed's command line. Other audiences override what they call otherwise."""

    def __call__(self, fix: Fix) -> str:
        parts: list[str] = []
        for before, step in zip((None, *fix), fix, strict=False):
            if before is not None and _removed(before) and (removed := _removed(step)):
                parts[-1] += f" or {removed}"
            else:
                parts.append(self.step(step))
        return ", or ".join(parts)

    def step(self, step: FixStep) -> str:
        """Return one alternative."""
        match step:
            case GiveField(name, value, note, or_more):
                return _with_note(f"{self.give_field(name, value)}{' or more' if or_more else ''}", note)
            case DropField(name, "job file"):
                return f"remove {name} from the job file"
            case DropField(name):
                return self.drop_field(name)
            case GiveSetting(setting, value, note):
                return _with_note(self.give_setting(setting, value), note)
            case DropSetting(setting):
                return f"remove the setting {setting}"
            case GiveOption(option, value, note):
                return _with_note(self.give_option(option, value), note)
            case DropOption() | RemoveFeature():
                return f"remove {_removed(step)}"
            case AddFeature(name):
                return self.add_feature(name)
            case RunCommand(command):
                return command
            case Advice(text):
                return text
            case Together(steps):
                return self.together(steps)

    def give_field(self, name: str, value: Any) -> str:
        option = name.replace("_", "-")
        if isinstance(value, bool):
            return f"--{option}" if value else f"--no-{option}"
        return f"--{option} {'N' if value is None else value}"

    def drop_field(self, name: str) -> str:
        return f"remove --{name.replace('_', '-')}"

    def give_setting(self, setting: str, value: Any) -> str:
        text = f"{setting}={_as_yaml(value)}"
        return f"--set {shlex.quote(text) if _SHELL.search(text) else text}"

    def give_option(self, option: str, value: Any) -> str:
        return option if value is True else f"{option} {value}"

    def add_feature(self, name: str) -> str:
        return f"add {name} to the features"

    def together(self, steps: Fix) -> str:
        if removed := _removed(Together(steps)):
            return f"remove {removed}"
        texts = dict.fromkeys(map(self.step, steps))
        return (" " if all(isinstance(step, GiveField | GiveOption) for step in steps) else " and ").join(texts)


_KEYWORDS: Final = {
    "--optimization-level": "level",
    "--strict": "strict",
    "--only": "only",
    "--without": "without",
    "--features": "features",
}


class PythonApi(CommandLine):
    """Say fixes in the arguments of ``mindspeed.plan``."""

    def give_field(self, name: str, value: Any) -> str:
        return f'world={{"{name}": {_as_python(value)}}}'

    def drop_field(self, name: str) -> str:
        return f'remove "{name}" from world'

    def give_setting(self, setting: str, value: Any) -> str:
        feature, _, name = setting.partition(".")
        return f'settings={{"{feature}": {{"{name}": {_as_python(value)}}}}}'

    def give_option(self, option: str, value: Any) -> str:
        keyword = _KEYWORDS.get(option)
        return f"{keyword}={value!r}" if keyword is not None else super().give_option(option, value)

    def add_feature(self, name: str) -> str:
        return f'add "{name}" to features'

    def together(self, steps: Fix) -> str:
        fields = [f'"{step.field}": {_as_python(step.value)}' for step in steps if isinstance(step, GiveField)]
        others = [self.step(step) for step in steps if not isinstance(step, GiveField)]
        return " and ".join([*([f"world={{{', '.join(fields)}}}"] if fields else []), *others])


on_command_line: Final = CommandLine()
in_python: Final = PythonApi()


def _removed(step: FixStep) -> str:
    """Return what a step removes; empty for any other step."""
    match step:
        case DropOption(name) | RemoveFeature(name):
            return name
        case Together(steps):
            names = [_removed(one) for one in steps]
            return " and ".join(names) if all(names) else ""
    return ""


def _as_yaml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return f"[{','.join(map(_as_yaml, value))}]"
    text = "VALUE" if value is None else str(value)
    return "'{}'".format(text.replace("'", "''")) if _NOT_PLAIN.search(text) else text


def _as_python(value: Any) -> str:
    return "..." if value is None else f'"{value}"' if isinstance(value, str) else repr(value)


def _with_note(text: str, note: str) -> str:
    return f"{text} ({note})" if note else text
