"""The result of one check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

MOST: Final = 10
"""Mistakes of a check that are listed."""

TODO: Final = "TODO:"
"""Beginning of the texts that ``mindspeed features new`` leaves to the author."""

OutcomeState = Literal["ok", "failed", "not run"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of ``check`` for ``feature``: its state, one line of text, and a line for each mistake."""

    feature: str
    check: str
    state: OutcomeState
    text: str
    details: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join([f"{self.feature}: {self.check} {self.state}: {self.text}", *(f"  {line}" for line in self.details)])


def judged(feature: str, check: str, wrong: list[str], fine: str) -> Outcome:
    """``ok`` with the text ``fine``, or ``failed`` with what is wrong."""
    if not wrong:
        return Outcome(feature, check, "ok", fine)
    more = [f"and {len(wrong) - MOST} more"] if len(wrong) > MOST else []
    return Outcome(feature, check, "failed", wrong[0], (*wrong[1:MOST], *more))
