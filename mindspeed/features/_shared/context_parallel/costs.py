"""How many bytes a rank sends for one layer, from closed forms: what a choice of algorithm is made by.

With ``t`` tokens on a rank, ``P`` ranks, and the key heads being a share r of the query heads, a ring sends r P / (1 + r)
times what Ulysses does, so it is the cheaper one for few key heads and few ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed.features._shared.context_parallel.heads_share import copies

WIDE = 4
"""Bytes of a gradient of keys and values while it is summed over ranks."""


@dataclass(frozen=True, slots=True)
class Attention:
    """One layer's attention on one rank: ``tokens`` here times batch, and bytes of an element."""

    tokens: int
    heads: int
    groups: int
    width: int
    value_width: int
    element: int

    @property
    def block(self) -> int:
        """Numbers in this rank's keys and values."""
        return self.tokens * self.groups * (self.width + self.value_width)


@dataclass(frozen=True, slots=True)
class Bytes:
    """Sent by one rank in forward and in backward."""

    forward: int
    backward: int

    @property
    def both(self) -> int:
        return self.forward + self.backward

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(self.forward + other.forward, self.backward + other.backward)


def ring(a: Attention, ranks: int) -> Bytes:
    """Keys and values go round once in each direction of time, their gradients once."""
    forward = (ranks - 1) * a.block * a.element
    return Bytes(forward, forward + (ranks - 1) * a.block * WIDE)


def ulysses(a: Attention, ranks: int) -> Bytes:
    """Query, key, value and result are traded once forward, their gradients once backward."""
    keys = a.groups * copies(a.heads, a.groups, ranks)
    numbers = a.tokens * (a.heads + keys) * (a.width + a.value_width)
    sent = numbers * a.element * (ranks - 1) // ranks
    return Bytes(sent, sent)


def hybrid(a: Attention, inner: int, outer: int) -> Bytes:
    """Ulysses over ``inner`` ranks around a ring of ``outer``, whose ranks have more tokens of fewer heads."""
    keys = a.groups * copies(a.heads, a.groups, inner) // inner
    inside = Attention(a.tokens * inner, a.heads // inner, keys, a.width, a.value_width, a.element)
    return ulysses(a, inner) + ring(inside, outer)


def gathered(a: Attention, ranks: int) -> Bytes:
    """Keys and values are gathered in forward and again in backward; gradients are scattered to their owners."""
    forward = (ranks - 1) * a.block * a.element
    return Bytes(forward, forward + (ranks - 1) * a.block * WIDE)
