"""Bugs of Megatron, and combinations of arguments that go wrong or slow, from a file with their sources. Light."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, Final

from mindspeed.engine.inspection.cli_arguments import Surface
from mindspeed.engine.resolution.environment import version_in
from mindspeed.engine.resolution.planned_feature import PlanNote
from mindspeed.files.tables import table_beside
from mindspeed.job.derivations import listed
from mindspeed.job.fields import PLATFORMS
from mindspeed.job.megatron_arguments import world_of
from mindspeed.megatron.fixes.feature import MENDED
from mindspeed.problems import Fix, Problem

STOPS: Final = "would not start"
CONSEQUENCES: Final = (STOPS, "hang", "wrong numbers", "lost state", "slow", "note")
"""In the order in which they are told."""


@dataclass(frozen=True, eq=False)
class Trap:
    """Describe a trap as its file does.

    Without ``when`` no arguments decide it. It explains the ``rule`` of Megatron's start, where it has one. A bug has
    ``proof``, the file of a test that shows it, or ``unproven``, why no test shows it here.
    """

    name: str
    source: str
    megatron: str
    consequence: str
    text: str
    fix: str = ""
    when: Mapping[str, str | list[str]] = field(default_factory=dict)
    environ: Mapping[str, list[str]] = field(default_factory=dict)
    indivisible: Mapping[str, str] = field(default_factory=dict)
    unequal: Mapping[str, str] = field(default_factory=dict)
    reaches: Mapping[str, str] = field(default_factory=dict)
    exceeds: Mapping[str, str] = field(default_factory=dict)
    lengths: Mapping[str, str] = field(default_factory=dict)
    platforms: Sequence[str] = PLATFORMS
    launchers: Sequence[str] = ()
    programs: Sequence[str] = ()
    rule: str = ""
    proof: str = ""
    unproven: str = ""

    @property
    def is_bug(self) -> bool:
        """Return whether the trap is a bug of Megatron, and no choice of its user."""
        return bool(self.proof or self.unproven)

    @property
    def has_fix(self) -> bool:
        """Return whether a plan mends it, in some release."""
        return self.name in MENDED

    @property
    def reads(self) -> frozenset[str]:
        """The arguments, by dest, and the fields of the job that decide whether it catches a command."""
        related = (text for relation in _RELATIONS for pair in getattr(self, relation).items() for text in pair)
        return frozenset(name for text in (*self.when, *related) for name in re.split(r" \* | // ", text))

    def catches(self, values: Mapping[str, Any], environ: Mapping[str, str], launcher: str, program: str) -> bool:
        """Return whether arguments, environment variables, launcher and program are those of the trap."""
        if (self.launchers and launcher not in self.launchers) or (self.programs and program not in self.programs):
            return False
        set_so = all(environ.get(name) in wanted for name, wanted in self.environ.items())
        related = all(
            relates(_value(one, values), _value(other, values))
            for name, relates in _RELATIONS.items()
            for one, other in getattr(self, name).items()
        )
        return (
            bool(self.when)
            and set_so
            and related
            and all(_holds(_value(name, values), wanted) for name, wanted in self.when.items())
        )

    @property
    def problem(self) -> Problem:
        """The trap as a mistake, where the command would not start."""
        text = f"Megatron-LM accepts this command and then fails: {self.text}"
        return Problem("MS115", text, where=self.source, fix=Fix.advise(self.fix))

    @property
    def note(self) -> PlanNote:
        """The trap as a row of a plan."""
        return PlanNote("warning", "megatron-lm", str(self))

    def __str__(self) -> str:
        fixes = ", or ".join(
            filter(None, (self.fix, "train with mindspeed, whose plan mends it by default" if self.has_fix else ""))
        )
        return f"{self.consequence}: {self.text}; fix: {fixes} ({self.source})"


@lru_cache(maxsize=1)
def known_traps() -> tuple[Trap, ...]:
    """Every trap of the file, the worst first."""
    return tuple(sorted((Trap(**row) for row in table_beside(__file__)), key=lambda trap: CONSEQUENCES.index(trap.consequence)))


def traps_of(
    given: Mapping[str, Any], known: Surface, environ: Mapping[str, str], platform: str, launcher: str = "", program: str = ""
) -> Iterator[Trap]:
    """Yield the traps that arguments, by dest, fall into on a platform under a launcher in a program (its file)."""
    values = {dest: arguments[0].default for dest, arguments in known.by_dest.items()} | dict(given)
    values |= {f"job.{name}": value for name, (value, _) in world_of(values).items()}
    name = Path(program).name
    for trap in known_traps():
        in_place = version_in(known.version, trap.megatron) and platform in trap.platforms
        if in_place and trap.catches(values, environ, launcher, name):
            yield trap


def _value(name: str, values: Mapping[str, Any]) -> Any:
    """The value of an argument, a field of the job (``job.``), a number, a product or a quotient; None if one is missing."""
    if name.isdigit():
        return int(name)
    if len(parts := name.split(" // ")) == 2:
        number, divisor = (_value(part, values) for part in parts)
        return number // divisor if isinstance(number, int) and isinstance(divisor, int) and divisor else None
    factors = [values.get(one) for one in name.split(" * ")]
    if len(factors) == 1:
        return factors[0]
    numbers = [factor for factor in factors if isinstance(factor, (int, float))]
    return prod(numbers) if len(numbers) == len(factors) else None


def _differs(value: Any, other: Any) -> bool:
    """Return whether a value is given and another one."""
    return value not in (None, other)


def _reaches(number: Any, limit: Any) -> bool:
    """Return whether a number is not less than a limit that is given."""
    return isinstance(number, int) and isinstance(limit, int) and number >= limit > 0


def _exceeds(number: Any, limit: Any) -> bool:
    """Return whether a number is greater than a limit that is given."""
    return isinstance(number, (int, float)) and isinstance(limit, (int, float)) and number > limit


def _is_odd(number: Any, divisor: Any) -> bool:
    """Return whether both are whole numbers above zero and the first is no multiple of the second."""
    return all(isinstance(one, int) and one > 0 for one in (number, divisor)) and bool(number % divisor)


def _has_other_length(value: Any, length: Any) -> bool:
    """Return whether a value is the text of a list of another length."""
    found = listed(value) if isinstance(value, str) else value
    return isinstance(found, list) and isinstance(length, int) and len(found) != length


_RELATIONS: Final = {
    "indivisible": _is_odd,
    "unequal": _differs,
    "reaches": _reaches,
    "exceeds": _exceeds,
    "lengths": _has_other_length,
}
"""Relations of two values of a trap, by the name of its field."""


def _holds(value: Any, wanted: str | list[str]) -> bool:
    values = value if isinstance(value, list) else [value]
    if wanted in ("on", "off"):
        return bool(value) is (wanted == "on")
    if isinstance(wanted, list):
        return any(str(one) in wanted for one in values)
    return any(float(one) > float(wanted.removeprefix(">")) for one in values if isinstance(one, (int, float)))
