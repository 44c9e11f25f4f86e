"""Problems: one per mistake. ``error_codes.yaml`` explains every code once.

A problem is written for the person who must act on it: a code, one sentence, who is
involved, where it was declared, and the fix. Nothing here raises at the first problem;
callers collect them and raise one error that carries them all.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Problem:
    """Describe one mistake in the user's words.

    ``code`` is a key of `error_codes`; ``message`` one sentence; ``features`` the names involved;
    ``chain`` the lines that explain why each of them is there; ``where`` a place the reader
    can open (distribution, version, file:line, or the source of a value); ``fix`` what to do.
    """

    code: str
    message: str
    features: tuple[str, ...] = ()
    chain: tuple[str, ...] = ()
    where: str = ""
    fix: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"{self.code} {self.message}"]
        lines += [f"  because: {line}" for line in self.chain]
        if self.where:
            lines.append(f"  where: {self.where}")
        if self.fix:
            lines.append(f"  fix: {self.fix}")
        return "\n".join(lines)


class MindSpeedError(Exception):
    """Base of every error that mindspeed raises; ``problems`` holds all of them."""

    def __init__(self, problems: Iterable[Problem] | str) -> None:
        if isinstance(problems, str):  # of Megatron's build_module, which raises errors again by their type and a longer text
            before = sys.exc_info()[1]
            problems = before.problems if isinstance(before, MindSpeedError) else ()
        self.problems: tuple[Problem, ...] = tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.problems,)


class ResolutionError(MindSpeedError):
    """The request cannot become a plan."""


class PatchError(MindSpeedError):
    """A patch cannot be applied, or cannot be undone."""


class PlatformError(MindSpeedError):
    """The device layer cannot do what was asked."""


class RunError(MindSpeedError):
    """A run cannot start or go on: data, checkpoint, disk, a lost rank."""


@cache
def error_codes() -> dict[str, str]:
    """Read every code with the paragraph that ``mindspeed explain CODE`` prints."""
    import yaml

    codes: dict[str, str] = yaml.safe_load(Path(__file__).with_name("error_codes.yaml").read_text(encoding="utf-8"))
    return codes
