"""Flags that Megatron's parser does not have and another package translates: the entry-point group ``mindspeed.dialects``."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Protocol

from mindspeed.engine.resolution.request import Layer
from mindspeed.plugins.discovery import Catalog
from mindspeed.plugins.extensions import extensions
from mindspeed.problems.problem import Problem

ENTRY_POINTS: Final = "mindspeed.dialects"


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


@lru_cache(maxsize=1)
def dialects() -> tuple[Dialect, ...]:
    """Load every installed dialect. Raises MindSpeedError (MS101) for a package that cannot be imported."""
    return tuple(extension.load() for extension in extensions(ENTRY_POINTS))


def translations(argv: Sequence[str], known: Collection[str], catalog: Catalog) -> list[tuple[Dialect, Translation]]:
    """Translate a command line by one dialect after the other; the rest of the last one is what Megatron reads."""
    made = []
    for dialect in dialects():
        made.append((dialect, dialect.translate(argv, known, catalog)))
        argv = made[-1][1].rest
    return made
