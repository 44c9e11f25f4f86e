"""Distribute key heads over the ranks of a head all-to-all."""

from __future__ import annotations

from math import gcd


def copies(heads: int, groups: int, ranks: int) -> int:
    """Count the ranks that each of ``groups`` key heads is sent to, so that every rank gets those that its query heads use."""
    least = ranks // gcd(groups, ranks)
    return least if heads // groups % least == 0 else heads // groups
