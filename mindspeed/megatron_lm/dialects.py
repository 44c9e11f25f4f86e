"""Flags that Megatron's parser does not have and another package translates: the entry-point group ``mindspeed.dialects``."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Final, Protocol, TypeVar

from mindspeed.engine.resolution.request import Layer
from mindspeed.plugins.discovery import Catalog
from mindspeed.plugins.extensions import Extension, extensions
from mindspeed.problems import MindSpeedError, Problem, brief

ENTRY_POINTS: Final = "mindspeed.dialects"
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Translation:
    """Hold the translated flags of a command line.

    ``layer`` goes below every other source; ``rest`` is the command line without the translated flags; ``notes`` name the new
    spelling of each; ``problems`` are flags of what does not exist (MS111, MS113), or without their value (MS301);
    ``left_out`` are flags without which the run computes the same, a problem of strict requests alone; ``fallbacks`` are
    features that the dialect's own program enables, with the reason, unless another one is named.
    """

    layer: Layer
    rest: tuple[str, ...]
    notes: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()
    left_out: tuple[Problem, ...] = ()
    fallbacks: tuple[tuple[str, str], ...] = ()


class Dialect(Protocol):
    """Translate flags of another program; an entry point names an instance."""

    name: str
    """Label of its notes in a plan."""

    def translate(self, argv: Sequence[str], known: Collection[str], catalog: Catalog) -> Translation:
        """Translate a command line. ``known`` are the flags of the parser that reads the rest: those are never touched."""

    def advice(self, given: Mapping[str, object], version: str | None) -> str:
        """Return a sentence about a command with translated flags, or ''; ``given`` has Megatron's arguments by dest."""

    def flags_of(self, feature: str) -> Sequence[str]:
        """Return the flags that map to a feature."""

    def takes_text(self, flag: str) -> bool:
        """Return whether a flag takes one text, such as a path."""

    def refusal_of(self, program: str) -> Problem | None:
        """Return the problem of a program that Megatron-LM does not have."""


class GuardedDialect:
    """Call an installed dialect; one that fails is skipped from then on, and its problem is kept in `broken`."""

    broken: ClassVar[dict[str, Problem]] = {}

    def __init__(self, extension: Extension, dialect: Any) -> None:
        self._extension, self._dialect = extension, dialect
        self.name = str(getattr(dialect, "name", extension.name))

    def translate(self, argv: Sequence[str], known: Collection[str], catalog: Catalog) -> Translation | None:
        """Translate a command line; None if that fails."""
        made: object = self._ask("translate", None, argv, known, catalog)
        if isinstance(made, Translation):
            return made
        if self._extension.reference not in self.broken:
            self._leave_out(f"returned {brief(made)} from translate, not a Translation")
        return None

    def advice(self, given: Mapping[str, object], version: str | None) -> str:
        """See `Dialect.advice`."""
        return self._ask("advice", "", given, version)

    def flags_of(self, feature: str) -> Sequence[str]:
        """See `Dialect.flags_of`."""
        return self._ask("flags_of", (), feature)

    def takes_text(self, flag: str) -> bool:
        """See `Dialect.takes_text`."""
        return self._ask("takes_text", False, flag)

    def refusal_of(self, program: str) -> Problem | None:
        """See `Dialect.refusal_of`."""
        return self._ask("refusal_of", None, program)

    def _ask(self, method: str, otherwise: Answer, *given: object) -> Answer:
        if self._extension.reference in self.broken:
            return otherwise
        try:
            answer: Answer = getattr(self._dialect, method)(*given)
        except MindSpeedError:
            raise
        except Exception as error:  # a package may fail in any way
            self._leave_out(f"failed in {method}: {type(error).__name__}: {error}")
            return otherwise
        return answer

    def _leave_out(self, what: str) -> None:
        self.broken[self._extension.reference] = self._extension.broken("MS101", what).problems[0]


@lru_cache(maxsize=1)
def dialects() -> tuple[GuardedDialect, ...]:
    """Load every installed dialect; a package that cannot be imported is skipped (`broken_dialects`)."""
    loaded = []
    GuardedDialect.broken.clear()
    for extension in extensions(ENTRY_POINTS):
        try:
            loaded.append(GuardedDialect(extension, extension.load()))
        except MindSpeedError as error:
            GuardedDialect.broken[extension.reference] = error.problems[0]
    return tuple(loaded)


def broken_dialects() -> list[Problem]:
    """List a problem for each dialect that was skipped: its package alone is without effect."""
    return [*GuardedDialect.broken.values()]


def translations(argv: Sequence[str], known: Collection[str], catalog: Catalog) -> list[tuple[GuardedDialect, Translation]]:
    """Translate a command line by one dialect after the other; the rest of the last one is what Megatron reads."""
    made = []
    for dialect in dialects():
        if (translation := dialect.translate(argv, known, catalog)) is not None:
            made.append((dialect, translation))
            argv = translation.rest
    return made
