"""The choice, for each of several groups of activations, whether they are kept, that takes the least time in a budget."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

EXACT: Final = 16
"""Groups up to which the choice is the optimum; with more its time is at most 1 % above."""
_LOSS: Final = 0.01


@dataclass(frozen=True, slots=True)
class Option:
    """A way to have a group's contents in backward: its bytes at the peak, and its seconds for each step."""

    name: str
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _Partial:
    """The choice in the first groups: its last option, and the choice in the groups before."""

    bytes: int
    seconds: float
    before: _Partial | None = None
    option: int = 0


def choose(groups: Sequence[Sequence[Option]], budget: int) -> list[int] | None:
    """Return the index of the option to take in each group, None where even the smallest choice is above the budget.

    Choices that another one beats in bytes and in time are dropped group by group; above `EXACT` groups also those that are
    within a small factor of another one's time, so small that all factors together are 1 %.
    """
    factor = 0.0 if len(groups) <= EXACT else math.log1p(_LOSS / len(groups))
    rest = [0] * (len(groups) + 1)
    for index in reversed(range(len(groups))):
        rest[index] = rest[index + 1] + min(option.bytes for option in groups[index])
    front = [_Partial(0, 0.0)]
    for index, group in enumerate(groups):
        longer = [
            _Partial(one.bytes + option.bytes, one.seconds + option.seconds, one, number)
            for one in front
            for number, option in enumerate(group)
            if one.bytes + option.bytes + rest[index + 1] <= budget
        ]
        front = _undominated(longer, factor)
        if not front:
            return None
    return _options(min(front, key=lambda one: (one.seconds, one.bytes)))


def _undominated(partials: list[_Partial], factor: float) -> list[_Partial]:
    """Keep what no other beats; with a factor, of those with nearly one time the one with least bytes."""
    if factor:
        lightest: dict[int, _Partial] = {}
        for one in partials:
            place = math.floor(math.log(one.seconds) / factor) if one.seconds > 0 else -(10**9)
            other = lightest.get(place)
            if other is None or (one.bytes, one.seconds) < (other.bytes, other.seconds):
                lightest[place] = one
        partials = list(lightest.values())
    kept: list[_Partial] = []
    for one in sorted(partials, key=lambda one: (one.bytes, one.seconds)):
        if not kept or one.seconds < kept[-1].seconds:
            kept.append(one)
    return kept


def _options(last: _Partial) -> list[int]:
    chosen: list[int] = []
    one: _Partial = last
    while one.before is not None:
        chosen.append(one.option)
        one = one.before
    return chosen[::-1]
