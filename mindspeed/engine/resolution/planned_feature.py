"""PlannedFeature, Reason and PlanNote: an active feature, why it is active, and a line that the reader of a plan must know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, NamedTuple

from mindspeed.job.world import size_name
from mindspeed.problems import CommandLine, Text, marked, on_command_line

DEFAULT: Final = marked("default")
"""The source of a value that nobody gave."""


@dataclass(frozen=True, slots=True)
class Value:
    """A setting's value, where it came from, and what it overrode (``"job file: 1"``).

    ``option`` is the argument of Megatron-LM that gives it, ``required_by`` the feature that requires it;
    plans keep neither.
    """

    value: Any
    source: str
    overrode: tuple[str, ...] = ()
    option: str = field(default="", compare=False)
    required_by: str = field(default="", compare=False)

    def to_json(self) -> dict[str, Any]:
        return {"value": self.value, "source": self.source, "overrode": self.overrode}


class ReasonKind(str, Enum):
    """Kinds of reasons for an active feature."""

    REQUESTED = "requested"
    ARGUMENT = "argument"
    REQUIRED = "required"
    SIZE = "size"
    FIELD = "field"
    LEVEL_ONE = "level-one"
    NAMED = "named"
    CHOSEN = "chosen"
    EVERY_PLAN = "every-plan"


_SENTENCES: Mapping[ReasonKind, str] = {
    ReasonKind.REQUESTED: marked("requested"),
    ReasonKind.ARGUMENT: marked("requested by {source}"),
    ReasonKind.REQUIRED: marked("required by {by}"),
    ReasonKind.SIZE: marked("the {size} is {value}"),
    ReasonKind.FIELD: "{note}",
    ReasonKind.LEVEL_ONE: marked("switched on by optimization level 1"),
    ReasonKind.NAMED: marked("{by}.{name} ({source}) names it"),
    ReasonKind.CHOSEN: marked("{by}.{name} is auto ({source}), and it {note}"),
    ReasonKind.EVERY_PLAN: marked("part of every plan"),
}


class Reason(NamedTuple):
    """The reason why ``feature`` is active.

    ``by`` is the feature that requires it or whose setting ``name`` names or chooses it, empty where the request itself does;
    ``name`` and ``value`` are the size above one; ``source`` is where the request, size or setting comes from; ``note`` is the
    author's reason of a requirement, what a choice costs, or the speeds measured of what level 1 switches on.
    """

    feature: str
    kind: ReasonKind
    by: str = ""
    name: str = ""
    value: Any = None
    source: str = ""
    note: str = ""

    @property
    def sentence(self) -> Text:
        """The reason as a sentence."""
        note = Text.plain(self.note)
        size = Text.plain(size_name(self.name)) if self.kind is ReasonKind.SIZE else ""
        sentence = Text.filled(_SENTENCES[self.kind], self._asdict() | {"size": size, "note": note})
        if self.note and self.kind is ReasonKind.REQUIRED:
            return Text.of("{sentence}, because {note}", sentence=sentence, note=note)
        if self.note and self.kind is ReasonKind.LEVEL_ONE:
            return Text.of("{sentence}; {note}", sentence=sentence, note=note)
        return sentence

    def __str__(self) -> str:
        return str(self.sentence)

    @property
    def line(self) -> Text:
        """The sentence behind the name of the feature."""
        return Text.of("{name}: {text}", name=self.feature, text=self.sentence)


class PlannedFeature(NamedTuple):
    """An active feature: its settings, and the chain of reasons that brought it in."""

    name: str
    distribution: str
    version: str
    why: tuple[Reason, ...]
    settings: Mapping[str, Value]
    level: int = 2
    slots: tuple[str, ...] = ()

    @property
    def requested(self) -> bool:
        """Return whether the feature is requested or required by a requested one; False if only level 1 added it."""
        return self.why[-1].kind is not ReasonKind.LEVEL_ONE

    @property
    def args(self) -> dict[str, Any]:
        """The plain settings, as the argument model takes them."""
        return {name: value.value for name, value in self.settings.items()}

    def to_json(self) -> dict[str, Any]:
        settings = {name: value.to_json() for name, value in self.settings.items()}
        return self._asdict() | {"why": [reason._asdict() for reason in self.why], "settings": settings}


@dataclass(frozen=True, slots=True)
class PlanNote:
    """Something the reader must know: ``kind`` is note, warning, choice, left-out, disabled, prepared-first
    or not-checked.

    ``fields`` are the fields of the job that decide what is not checked.
    """

    kind: str
    feature: str
    text: str
    fields: tuple[str, ...] = ()

    def line(self, words: CommandLine = on_command_line) -> str:
        """Return the text, with the options that an audience gives to have it checked."""
        text = words.translate(self.text)
        return (
            words.say("{text}; give {options}", text=text, options=", ".join(map(words.option, self.fields)))
            if self.fields
            else text
        )

    def to_json(self) -> dict[str, Any]:
        fields = {"fields": list(self.fields)} if self.fields else {}
        return {"kind": self.kind, "feature": self.feature, "text": self.text, **fields}
