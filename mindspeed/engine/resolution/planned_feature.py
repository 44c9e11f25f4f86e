"""PlannedFeature and PlanNote: one active feature with the reasons for it, and one line that the reader of a plan must know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple

BY_LEVEL_ONE: Final = "optimization level 1 switches it on"
"""The reason for a feature that nothing else brings in."""


@dataclass(frozen=True, slots=True)
class Value:
    """A setting's value, where it came from, and what it overrode (``"job file: 1"``)."""

    value: Any
    source: str
    overrode: tuple[str, ...] = ()


class PlannedFeature(NamedTuple):
    """An active feature: its settings, and the chain of reasons that brought it in."""

    name: str
    distribution: str
    version: str
    why: tuple[str, ...]
    settings: Mapping[str, Value]
    level: int = 2
    slots: tuple[str, ...] = ()

    @property
    def requested(self) -> bool:
        """Return whether the request asks for it or for a feature that requires it; False where level 1 alone brought it in."""
        return not self.why[-1].endswith(f": {BY_LEVEL_ONE}")

    @property
    def args(self) -> dict[str, Any]:
        """The plain settings, as the argument model takes them."""
        return {name: value.value for name, value in self.settings.items()}

    def to_json(self) -> dict[str, Any]:
        return self._asdict() | {"settings": {name: asdict(value) for name, value in self.settings.items()}}


@dataclass(frozen=True, slots=True)
class PlanNote:
    """Something the reader must know: ``kind`` is note, warning, choice, left-out, disabled or not-checked."""

    kind: str
    feature: str
    text: str
