"""The words of a command line while old flags are translated into Megatron-LM's own."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from mindspeed.problems import Fix, Fixes, GivenValue, Problem

Count = int | Literal["+"]
"""Number of values that an option takes."""


def whole_number(text: str) -> int | None:
    """The number that a text is, as bash reads it; None where it is none, or one of more than 18 digits."""
    return int(text) if re.fullmatch(r"[-+]?[0-9]{1,18}", text) else None


def problem_of_flags(
    code: str, message: str, flags: Iterable[str], fix: Fixes | Fix, features: tuple[str, ...] = ()
) -> Problem:
    """A problem of flags on the command line."""
    facts = (GivenValue(flag, source="command line", option=flag) for flag in flags)
    return Problem(code, message, features, where="command line", fix=fix, facts=facts)


@dataclass(slots=True)
class ArgumentWords:
    """Hold words and what was found in them: ``notes``, ``problems``, and in ``left_out`` what only strict requests refuse.

    ``known`` are the options of Megatron's parser.
    """

    words: list[str]
    known: Collection[str] = frozenset()
    notes: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    left_out: list[Problem] = field(default_factory=list)

    def has(self, flag: str) -> bool:
        return any(word.partition("=")[0] == flag for word in self._options())

    def value(self, flag: str) -> str | None:
        """The last value of an option; None where it stands without one, or not at all."""
        found = None
        words = self._options()
        for word, after in pairwise([*words, "--"]):
            name, equals, value = word.partition("=")
            if name == flag:
                found = value if equals else None if after.startswith("--") else after
        return found

    def number(self, flag: str) -> int | None:
        """The last value of an option, if it is a whole number."""
        value = self.value(flag)
        return whole_number(value) if value is not None else None

    def take(self, flag: str, count: Count) -> list[str] | None:
        """Remove every occurrence of an option with its values, and return its last values; None if it is missing."""
        return self.replace(flag, count, [])

    def replace(self, flag: str, count: Count, by: Sequence[str]) -> list[str] | None:
        """Put words in the place of an option; ``VALUE`` in them becomes its value. Return its last values."""
        found = self.replace_all(flag, count, by)
        return found[-1] if found else None

    def replace_all(self, flag: str, count: Count, by: Sequence[str] = ()) -> list[list[str]]:
        """Put words in the place of an option wherever it stands, and return its values at each place."""
        kept: list[str] = []
        found: list[list[str]] = []
        words = self._options()
        behind = self.words[len(words) :]
        while words:
            word = words.pop(0)
            name, equals, value = word.partition("=")
            if name != flag:
                kept.append(word)
                continue
            values = [value] if equals else []
            while words and not equals and not words[0].startswith("--") and (count == "+" or len(values) < count):
                values.append(words.pop(0))
            kept += [" ".join(values) if new == "VALUE" else new for new in by]
            found.append(values)
        self.words = [*kept, *behind]
        return found

    def change(self, flag: str, value: str) -> None:
        """Give another value to an option that has one, in the form in which it stands."""
        before = ["", *self.words]
        new = [f"{flag}={value}" if word.startswith(f"{flag}=") else word for word in self.words]
        self.words = [value if last == flag else word for last, word in zip(before, new, strict=False)]

    def put(self, *words: str) -> None:
        """Add words behind all options."""
        options = self._options()
        self.words = [*options, *words, *self.words[len(options) :]]

    def _options(self) -> list[str]:
        """The words before ``--``."""
        return self.words[: self.words.index("--")] if "--" in self.words else list(self.words)
