"""Slopes of linear position bias, by the rule of its authors (Press, Smith, Lewis, arXiv 2108.12409, section 3)."""

from __future__ import annotations


def slopes(heads: int) -> tuple[float, ...]:
    """Make a slope for each head: ``2 ** (-8 (i + 1) / heads)`` for a power of two.

    Any other number takes those of the power of two below, then every second one of twice that power.
    """
    power = 1 << heads.bit_length() - 1
    more = [2 ** (-4 * (i + 1) / power) for i in range(0, 2 * (heads - power), 2)]
    return (*(2 ** (-8 * (i + 1) / power) for i in range(power)), *more)
