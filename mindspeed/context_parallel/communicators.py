"""Names of the process groups that algorithms of context parallelism make. Light, no torch."""

from __future__ import annotations

from typing import Final

INNER_GROUP: Final = "HYBRID_INNER_GROUP"
OUTER_GROUP: Final = "HYBRID_OUTER_GROUP"
RING_SECOND_GROUP: Final = "RING_SECOND_GROUP"
RING_OUTER_GROUP: Final = "RING_OUTER_GROUP"
"""Descriptions of process groups: of ranks that exchange heads, of the ring across them, and two more of the ranks of a ring:
for the second direction, and for transfers between inner rings."""


def communicators_of_ring(ranks: int, window: int, second: bool = False) -> list[str]:
    """Return the further groups of a ring of ``ranks`` with windows of ``window``.

    One is enough for transfers between inner rings: each rank posts them in one order, and never ahead of one within its ring.
    """
    wanted = {RING_SECOND_GROUP: second, RING_OUTER_GROUP: window > 1}
    return [name for name, is_wanted in wanted.items() if is_wanted and ranks > 1]
