"""Problems: one per mistake. ``error_codes.yaml`` explains every code once.

Callers collect problems and raise one error that carries them all.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from mindspeed.problems.fixes import CommandLine, Fix, Fixes, fixes_from_json, fixes_to_json, on_command_line

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class GivenValue:
    """A value at fault: a field of the job (``tp``), a setting (``feature.name``) or an argument, and where it came from.

    ``option`` is the option that gives it on a command line, as it is written there.
    """

    name: str
    value: Any = field(default=None, hash=False)
    source: str = ""
    option: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"value": json.loads(json.dumps(self.value, default=repr))}


@dataclass(frozen=True, slots=True, init=False)
class Problem:
    """Describe one mistake in the user's words.

    ``code`` is a key of `error_codes`; ``message`` one sentence; ``features`` the names involved;
    ``chain`` the lines that explain why each of them is there; ``where`` a place the reader
    can open (distribution, version, file:line, or the source of a value); ``fix`` what to do, as alternatives;
    ``facts`` the values at fault; ``rule`` the name of the condition that does not hold, where it is one of a feature.
    """

    code: str
    message: str
    features: tuple[str, ...]
    chain: tuple[str, ...]
    where: str
    fix: Fixes
    facts: tuple[GivenValue, ...]
    rule: str = field(compare=False)

    def __init__(
        self,
        code: str,
        message: str,
        features: Iterable[str] = (),
        chain: Iterable[str] = (),
        where: str = "",
        fix: Fixes | Fix = (),
        facts: Iterable[GivenValue] = (),
        rule: str = "",
    ) -> None:
        if isinstance(fix, str):
            raise TypeError(
                f"the fix of {code} is a str; a fix is data: Fix.give_field(...), Fix.give_setting(...) or Fix.advise({fix!r})"
            )
        fixes = fix if isinstance(fix, tuple) else (fix,)
        values = (code, message, tuple(features), tuple(chain), where, fixes, tuple(facts), rule)
        for name, value in zip(self.__slots__, values, strict=True):
            object.__setattr__(self, name, value)

    @property
    def fix_text(self) -> str:
        """The fix in the options of mindspeed's command line."""
        return on_command_line(self.fix)

    def to_json(self, words: CommandLine = on_command_line) -> dict[str, Any]:
        """A JSON object; ``fix`` is the text for an audience, ``fixes`` the same as data."""
        texts = {name: getattr(self, name) for name in ("code", "message", "features", "chain", "where")}
        facts = [fact.to_json() for fact in self.facts]
        return texts | {"fix": words(self.fix), "fixes": fixes_to_json(self.fix), "facts": facts}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Problem:
        """Inverse of `to_json`."""
        facts = (GivenValue(**fact) for fact in data["facts"])
        return cls(
            data["code"], data["message"], data["features"], data["chain"], data["where"], fixes_from_json(data["fixes"]), facts
        )

    def text(self, words: CommandLine = on_command_line) -> str:
        """The lines of the problem, in the language of an audience and with the fix in its words.

        A message without a translation has the paragraph of its code behind it, where that has one.
        """
        message, lines = words.translate(self.message), []
        if message == self.message and words.translate is not str:
            paragraph = error_codes().get(self.code, "")
            about = words.translate(paragraph)
            lines += [words.say("about: {text}", text=about)] if about != paragraph else []
        lines += [words.say("because: {text}", text=words.translate(line)) for line in self.chain]
        lines += [words.say("where: {text}", text=words.translate(self.where))] if self.where else []
        lines += [words.say("fix: {text}", text=words(self.fix))] if self.fix else []
        return "\n  ".join([f"{self.code} {message}", *lines])

    def __str__(self) -> str:
        return self.text()


class MindSpeedError(Exception):
    """Base of every error that mindspeed raises; ``problems`` holds all of them, ``words`` formats fixes for the reader."""

    def __init__(self, problems: Iterable[Problem] | str, words: CommandLine = on_command_line) -> None:
        if isinstance(problems, str):  # of Megatron's build_module, which raises errors again by their type and a longer text
            before = sys.exc_info()[1]
            problems = before.problems if isinstance(before, MindSpeedError) else ()
        self.problems: tuple[Problem, ...] = tuple(problems)
        self.words = words
        super().__init__(self.problems)

    def __str__(self) -> str:
        return "\n".join(problem.text(self.words) for problem in self.problems)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.problems,), {"words": self.words}


class ResolutionError(MindSpeedError):
    """The request cannot become a plan."""


class PatchError(MindSpeedError):
    """A patch cannot be applied, or cannot be undone."""


class PlatformError(MindSpeedError):
    """The device layer cannot do what was requested."""


class RunError(MindSpeedError):
    """A run cannot start or go on: data, checkpoint, disk, a lost rank."""


class CollectedProblems(list[Problem]):
    """Problems of steps that do not depend on one another."""

    def collect(self, step: Callable[[], _Result]) -> _Result | None:
        """The result of a step, or None after its problems were collected."""
        try:
            return step()
        except MindSpeedError as error:
            self += [problem for problem in error.problems if problem not in self]
            return None


def brief(value: object, width: int = 80) -> str:
    """Return ``repr(value)`` for a message, cut where it is long, or the type where it has none."""
    try:
        text = repr(value)
    except Exception:  # an object of a plugin, or a number with too many digits
        text = f"a {type(value).__name__}"
    return text if len(text) <= width else f"{text[: width - 3]}..."


@cache
def error_codes() -> dict[str, str]:
    """Read every code with the paragraph that ``mindspeed explain CODE`` prints."""
    import yaml

    codes: dict[str, str] = yaml.safe_load(Path(__file__).with_name("error_codes.yaml").read_text(encoding="utf-8"))
    return codes
