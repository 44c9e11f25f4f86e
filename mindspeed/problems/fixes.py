"""Fixes of a problem, as data: each renderer formats them for its audience."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from dataclasses import field as declared
from difflib import get_close_matches
from itertools import groupby
from typing import Any, Final, Literal

from mindspeed.job.fields import FIELDS

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
    "rename",
    "keep-feature",
    "nothing",
]


@dataclass(frozen=True, slots=True)
class Fix:
    """Describe one way to mend a problem: a ``verb``, and the ``name`` of what it acts on.

    The name is a field of the job (`mindspeed.job.fields`), ``feature.setting``, an option, a feature, a command line, a
    sentence, or the reason why nothing mends the problem. Of a field, setting or option that is given, ``value`` None stands
    for any, of which ``note`` says more and ``example`` is one. ``steps`` are those of which none alone mends the problem.
    """

    verb: Verb
    name: str = ""
    value: Any = declared(default=None, hash=False)
    note: str = ""
    or_more: bool = False
    source: str = ""
    steps: tuple[Fix, ...] = ()
    example: str | None = declared(default=None, compare=False)

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
    def give_option(name: str, value: Any = True, note: str = "", example: str | None = None) -> Fix:
        """Give an option that is neither a field of the job nor a setting, with a value or as a switch (True)."""
        return Fix("give-option", name, value, note, example=example)

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

    @staticmethod
    def keep_feature(name: str) -> Fix:
        """Stop removing a feature from the request."""
        return Fix("keep-feature", name)

    @staticmethod
    def rename(name: str, value: str) -> Fix:
        """Write the name of a feature, of a ``feature.setting`` or of a field of the job in another way."""
        return Fix("rename", name, value)

    @staticmethod
    def nothing(reason: str) -> Fix:
        """Report that no change of the request mends the problem."""
        return Fix("nothing", reason)


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
    "keep-feature": {"name": "name"},
    "rename": {"name": "name", "value": "value"},
    "nothing": {"reason": "name"},
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
    """Return the known names most like ``name``, best first: one in other letters of upper and lower case is equal."""
    names, text = list(known), str(name)
    equal = [one for one in names if one.casefold() == text.casefold()]
    return equal or get_close_matches(text, names, n=number, cutoff=cutoff)


def suggestion(near: Sequence[str], otherwise: str = "") -> str:
    """Return ``did you mean a or b?``; without similar names the text ``otherwise``."""
    return on_command_line.suggestion(near) if near else otherwise


def renames(name: str, near: Iterable[str]) -> Fixes:
    """Return the fixes that write a name as one of those that are similar."""
    return tuple(Fix.rename(name, other) for other in near)


def filled(fixes: Fixes, feature: str, text: Callable[[str], str]) -> Fixes:
    """Return fixes in which ``text`` has filled every string, and the declaring ``feature`` every missing name."""
    return tuple(_filled(fix, feature, text) for fix in fixes)


def _filled(fix: Fix, feature: str, text: Callable[[str], str]) -> Fix:
    name: str = text(fix.name) if fix.verb in ("advice", "nothing") else str(text(fix.name))
    value = str(text(fix.value)) if isinstance(fix.value, str) else fix.value
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
    """Say fixes in the options of mindspeed's command line. Other audiences override what they call otherwise.

    ``translate`` gives a text in the language of the audience; `str` leaves it English.
    """

    translate: Callable[[str], str] = str

    def in_language(self, translate: Callable[[str], str]) -> CommandLine:
        """Return this audience with another language."""
        other = copy(self)
        vars(other)["translate"] = translate
        return other

    def say(self, template: str, *names: str, **values: object) -> str:
        """Return a template in the language of the audience; ``names`` are alternatives, which fill ``{names}``."""
        listed = {"names": self.translate(" or ").join(names)} if names else {}
        return self.translate(template).format(**listed, **values)

    def __call__(self, fixes: Fixes) -> str:
        parts: list[str] = []
        for verb, group in groupby(fixes, key=lambda fix: "remove" if len(_removals(fix)) == 1 else fix.verb):
            alike = list(group)
            if verb == "remove":
                parts.append(self.say("remove {names}", *map(self._removed, alike)))
            elif verb == "add-feature":
                parts.append(self.add_features([fix.name for fix in alike]))
            elif verb == "rename":
                parts.append(self.suggestion([fix.value for fix in alike]))
            else:
                parts += map(self.one, alike)
        return self.translate(", or ").join(parts)

    def one(self, fix: Fix) -> str:
        """Return one alternative."""
        match fix.verb:
            case "give-field":
                text = self.give_field(fix.name, fix.value)
                may_be_more = fix.or_more and text != self.drop_field(fix.name)
                return self._with_note(self.say("{value} or more", value=text) if may_be_more else text, fix.note)
            case "drop-field" if fix.source == "job file":
                return self.say("remove {name} from the job file", name=fix.name)
            case "drop-field":
                return self.drop_field(fix.name)
            case "give-setting":
                return self._with_note(self.give_setting(fix.name, fix.value), fix.note)
            case "drop-setting":
                return self.say("remove the setting {name}", name=fix.name)
            case "give-option":
                return self._with_note(self.give_option(fix.name, fix.value), fix.note)
            case "drop-option" | "remove-feature":
                return self.say("remove {names}", self._removed(fix))
            case "add-feature":
                return self.add_features([fix.name])
            case "run-command":
                return fix.name
            case "advice":
                return self.translate(fix.name)
            case "together":
                return self.together(fix.steps)
            case "keep-feature":
                return self.keep_feature(fix.name)
            case "rename":
                return self.suggestion([fix.value])
            case "nothing":
                return self.say("nothing mends it: {reason}", reason=self.translate(fix.name))

    def suggestion(self, names: Sequence[str]) -> str:
        """Return the question whether one of these names was meant."""
        return self.say("did you mean {names}?", *names)

    def option(self, field: str) -> str:
        """Return the option that gives a field of the job."""
        return f"--{field.replace('_', '-')}"

    def give_field(self, name: str, value: Any) -> str:
        option = self.option(name)
        if isinstance(value, bool):
            return option if value else f"--no-{option[2:]}"
        text = FIELDS[name].metavar if value is None else str(value)
        return f"{option} {text}" if text else self.either(option)

    def either(self, option: str) -> str:
        """Return a switch of which the reader knows whether it is on or off."""
        return f"--[no-]{option[2:]}"

    def drop_field(self, name: str) -> str:
        return self.say("remove {names}", self.option(name))

    def give_setting(self, setting: str, value: Any) -> str:
        text = f"{setting}={_as_yaml(value)}"
        return f"--set {shlex.quote(text) if _SHELL.search(text) else text}"

    def give_option(self, option: str, value: Any) -> str:
        return option if value is True else f"{option} {'N' if value is None else value}"

    def add_features(self, names: Sequence[str]) -> str:
        return self.say("add {names} to the features", *names)

    def keep_feature(self, name: str) -> str:
        return self.say("drop {option}", option=f"--without {name}")

    def together(self, steps: Fixes) -> str:
        if removed := self._removed(Fix.together(steps)):
            return self.say("remove {names}", removed)
        texts = dict.fromkeys(map(self.one, steps))
        are_options = all(step.verb in ("give-field", "give-option") for step in steps)
        return (" " if are_options else self.translate(" and ")).join(texts)

    def _removed(self, fix: Fix) -> str:
        """Return what a fix removes; empty for any other one."""
        return self.translate(" and ").join(_removals(fix))

    def _with_note(self, text: str, note: str) -> str:
        return self.say("{text} ({note})", text=text, note=self.translate(note)) if note else text


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

    def add_features(self, names: Sequence[str]) -> str:
        return f"add {' or '.join(map(_as_python, names))} to features"

    def keep_feature(self, name: str) -> str:
        return f'remove "{name}" from without'

    def together(self, steps: Fixes) -> str:
        fields = [f'"{step.name}": {_as_python(step.value)}' for step in steps if step.verb == "give-field"]
        others = [self.one(step) for step in steps if step.verb != "give-field"]
        return " and ".join([*([f"world={{{', '.join(fields)}}}"] if fields else []), *others])


on_command_line: Final = CommandLine()
in_python: Final = PythonApi()


def _removals(fix: Fix) -> list[str]:
    """Return what a fix removes; nothing where it does something else too."""
    if fix.verb in ("drop-option", "remove-feature"):
        return [fix.name]
    names = [_removals(step) for step in fix.steps]
    return [name for removed in names for name in removed] if all(names) else []


def _as_yaml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return f"[{','.join(map(_as_yaml, value))}]"
    text = "VALUE" if value is None else str(value)
    return "'{}'".format(text.replace("'", "''")) if _NOT_PLAIN.search(text) else text


def _as_python(value: Any) -> str:
    return "..." if value is None else f'"{value}"' if isinstance(value, str) else repr(value)
