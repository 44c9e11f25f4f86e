"""Fixes of a problem, as data: each renderer formats them for its audience."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import field as declared
from difflib import get_close_matches
from typing import Any, Final, Literal

Verb = Literal[
    "give-field",
    "drop-field",
    "give-setting",
    "drop-setting",
    "give-option",
    "drop-option",
    "add-feature",
    "remove-feature",
    "run-command",
    "advice",
    "together",
]


@dataclass(frozen=True, slots=True)
class Fix:
    """Describe one way to mend a problem: a ``verb``, and the ``name`` of what it acts on.

    The name is a field of the job (`mindspeed.job.fields`), ``feature.setting``, an option, a feature, a command line or a
    sentence. Of a field, setting or option that is given, ``value`` None stands for any, of which ``note`` says more. ``steps``
    are those of which none alone mends the problem.
    """

    verb: Verb
    name: str = ""
    value: Any = declared(default=None, hash=False)
    note: str = ""
    or_more: bool = False
    source: str = ""
    steps: tuple[Fix, ...] = ()

    @staticmethod
    def give_field(name: str, value: Any = None, note: str = "", or_more: bool = False) -> Fix:
        """Give a field of the job a value, or a greater one with ``or_more``."""
        return Fix("give-field", name, value, note, or_more)

    @staticmethod
    def drop_field(name: str, source: str = "") -> Fix:
        """Stop giving a field of the job, in its ``source`` where that is not the command line."""
        return Fix("drop-field", name, source=source)

    @staticmethod
    def give_setting(name: str, value: Any = None, note: str = "") -> Fix:
        """Give ``feature.setting`` a value; without a dot it is a setting of the declaring feature."""
        return Fix("give-setting", name, value, note)

    @staticmethod
    def drop_setting(name: str) -> Fix:
        """Stop giving ``feature.setting``."""
        return Fix("drop-setting", name)

    @staticmethod
    def give_option(name: str, value: Any = True, note: str = "") -> Fix:
        """Give an option that is neither a field of the job nor a setting, with a value or as a switch (True)."""
        return Fix("give-option", name, value, note)

    @staticmethod
    def drop_option(name: str) -> Fix:
        """Remove an option from a command."""
        return Fix("drop-option", name)

    @staticmethod
    def add_feature(name: str) -> Fix:
        """Request a feature."""
        return Fix("add-feature", name)

    @staticmethod
    def remove_feature(name: str = "") -> Fix:
        """Remove a feature; an empty name is the declaring feature."""
        return Fix("remove-feature", name)

    @staticmethod
    def run_command(command: str) -> Fix:
        """Run a command line."""
        return Fix("run-command", command)

    @staticmethod
    def advise(text: str) -> Fix:
        """Follow a sentence in the imperative, for what no other verb expresses."""
        return Fix("advice", text)

    @staticmethod
    def together(steps: Iterable[Fix]) -> Fix:
        """Take several steps, of which none alone mends the problem."""
        return Fix("together", steps=tuple(steps))


Fixes = tuple[Fix, ...]
"""Alternatives: each of them alone mends the problem."""

_KEYS: Final[Mapping[Verb, Mapping[str, str]]] = {
    "give-field": {"field": "name", "value": "value", "note": "note", "or_more": "or_more"},
    "drop-field": {"field": "name", "source": "source"},
    "give-setting": {"setting": "name", "value": "value", "note": "note"},
    "drop-setting": {"setting": "name"},
    "give-option": {"option": "name", "value": "value", "note": "note"},
    "drop-option": {"option": "name"},
    "add-feature": {"name": "name"},
    "remove-feature": {"name": "name"},
    "run-command": {"command": "name"},
    "advice": {"text": "name"},
    "together": {},
}
"""Keys of each kind of fix in JSON, and the attribute that each has."""


class SettingsError(ValueError):
    """The error that a validator of an argument model raises: contradicting settings, and the fix."""

    def __init__(self, text: str, *fix: Fix) -> None:
        super().__init__(text)
        self.fix: Fixes = fix


_SHELL: Final = re.compile(r"[\s'\"\[\](){}$&|;<>\\`]")
"""Characters that a shell does not hand on as they are."""
_NOT_PLAIN: Final = re.compile(r"^$|^[~#&*!|>%@`]|: | #|:$")
"""Texts that YAML reads as something else, unless they are quoted."""


def advice(text: str) -> Fixes:
    """Return a sentence as the fix; none where there is nothing to say."""
    return (Fix.advise(text),) if text else ()


def near_names(name: object, known: Iterable[str], cutoff: float = 0.5, number: int = 3) -> list[str]:
    """Return the known names most like ``name``, best first."""
    return get_close_matches(str(name), list(known), n=number, cutoff=cutoff)


def suggestion(near: Sequence[str], otherwise: str = "") -> str:
    """Return ``did you mean a or b?``; without similar names the text ``otherwise``."""
    return f"did you mean {' or '.join(near)}?" if near else otherwise


def filled(fixes: Fixes, feature: str, text: Callable[[str], str]) -> Fixes:
    """Return fixes in which ``text`` has filled every string, and the declaring ``feature`` every missing name."""
    return tuple(_filled(fix, feature, text) for fix in fixes)


def _filled(fix: Fix, feature: str, text: Callable[[str], str]) -> Fix:
    name, value = text(fix.name), text(fix.value) if isinstance(fix.value, str) else fix.value
    if fix.verb == "remove-feature":
        name = name or feature
    elif fix.verb in ("give-setting", "drop-setting") and "." not in fix.name:
        name = f"{feature}.{name}"
    return replace(
        fix, name=name, value=value, note=text(fix.note), source=text(fix.source), steps=filled(fix.steps, feature, text)
    )


def named_in(fixes: Fixes) -> Iterator[str]:
    """Yield the fields of the job and the settings that fixes give or drop."""
    for fix in fixes:
        if fix.verb in ("give-field", "drop-field", "give-setting", "drop-setting"):
            yield fix.name
        yield from named_in(fix.steps)


def fixes_to_json(fixes: Fixes) -> list[dict[str, Any]]:
    """Return fixes as JSON objects with a ``kind``."""
    return [
        {"kind": fix.verb, **{key: getattr(fix, name) for key, name in _KEYS[fix.verb].items()}}
        | ({"steps": fixes_to_json(fix.steps)} if fix.steps else {})
        for fix in fixes
    ]


def fixes_from_json(rows: Iterable[Mapping[str, Any]]) -> Fixes:
    """Inverse of `fixes_to_json`."""
    return tuple(
        Fix(
            row["kind"],
            **{_KEYS[row["kind"]][key]: value for key, value in row.items() if key not in ("kind", "steps")},
            steps=fixes_from_json(row.get("steps", ())),
        )
        for row in rows
    )


class CommandLine:
    """Say fixes in the options of mindspeed's command line. Other audiences override what they call otherwise."""

    def __call__(self, fixes: Fixes) -> str:
        parts: list[str] = []
        for before, fix in zip((None, *fixes), fixes, strict=False):
            if before is not None and _removed(before) and (removed := _removed(fix)):
                parts[-1] += f" or {removed}"
            else:
                parts.append(self.one(fix))
        return ", or ".join(parts)

    def one(self, fix: Fix) -> str:
        """Return one alternative."""
        match fix.verb:
            case "give-field":
                return _with_note(f"{self.give_field(fix.name, fix.value)}{' or more' if fix.or_more else ''}", fix.note)
            case "drop-field" if fix.source == "job file":
                return f"remove {fix.name} from the job file"
            case "drop-field":
                return self.drop_field(fix.name)
            case "give-setting":
                return _with_note(self.give_setting(fix.name, fix.value), fix.note)
            case "drop-setting":
                return f"remove the setting {fix.name}"
            case "give-option":
                return _with_note(self.give_option(fix.name, fix.value), fix.note)
            case "drop-option" | "remove-feature":
                return f"remove {_removed(fix)}"
            case "add-feature":
                return self.add_feature(fix.name)
            case "run-command" | "advice":
                return fix.name
            case "together":
                return self.together(fix.steps)

    def option(self, field: str) -> str:
        """Return the option that gives a field of the job."""
        return f"--{field.replace('_', '-')}"

    def give_field(self, name: str, value: Any) -> str:
        option = self.option(name)
        if isinstance(value, bool):
            return option if value else f"--no-{option[2:]}"
        return f"{option} {'N' if value is None else value}"

    def drop_field(self, name: str) -> str:
        return f"remove {self.option(name)}"

    def give_setting(self, setting: str, value: Any) -> str:
        text = f"{setting}={_as_yaml(value)}"
        return f"--set {shlex.quote(text) if _SHELL.search(text) else text}"

    def give_option(self, option: str, value: Any) -> str:
        return option if value is True else f"{option} {'N' if value is None else value}"

    def add_feature(self, name: str) -> str:
        return f"add {name} to the features"

    def together(self, steps: Fixes) -> str:
        if removed := _removed(Fix.together(steps)):
            return f"remove {removed}"
        texts = dict.fromkeys(map(self.one, steps))
        return (" " if all(step.verb in ("give-field", "give-option") for step in steps) else " and ").join(texts)


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

    def together(self, steps: Fixes) -> str:
        fields = [f'"{step.name}": {_as_python(step.value)}' for step in steps if step.verb == "give-field"]
        others = [self.one(step) for step in steps if step.verb != "give-field"]
        return " and ".join([*([f"world={{{', '.join(fields)}}}"] if fields else []), *others])


on_command_line: Final = CommandLine()
in_python: Final = PythonApi()


def _removed(fix: Fix) -> str:
    """Return what a fix removes; empty for any other one."""
    if fix.verb in ("drop-option", "remove-feature"):
        return fix.name
    names = [_removed(step) for step in fix.steps]
    return " and ".join(names) if all(names) else ""


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
