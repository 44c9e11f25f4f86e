"""Activation sets that are recomputed: which of them, and where R stands in the list. Light, no torch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from mindspeed.pipeline.operations import Op, Schedule

Unit = tuple[int, int]
"""Chunk and micro-batch."""


class LimitTooSmallError(ValueError):
    """No list keeps a limit of activation sets; ``least`` is the smallest that one does."""

    def __init__(self, limit: int, least: int) -> None:
        super().__init__(f"at least {least} activation sets exist at the same time, but the limit is {limit}")
        self.least = least


def recompute_all(base: Schedule) -> Schedule:
    """Put R before each backward, so that it runs while the gradient is on its way."""
    ops = tuple(tuple(_with_recompute(rank, {op[1:] for op in rank})) for rank in base.ops)
    return replace(base, name=f"{base.name}, R ahead", ops=ops)


def recompute_least(base: Schedule, limit: int) -> Schedule:
    """Recompute as few sets as keep each rank at ``limit`` activation sets. Raises LimitTooSmallError below `least_limit`."""
    if limit < (least := least_limit(base)):
        raise LimitTooSmallError(limit, least)
    ops = tuple(tuple(_with_recompute(rank, dropped_sets(rank, limit))) for rank in base.ops)
    return replace(base, name=f"{base.name}, at most {limit} sets", ops=ops)


def least_limit(base: Schedule) -> int:
    """Return the fewest activation sets a rank can be held to: those between backward and weight gradient."""
    most = 1
    for rank in base.ops:
        alive = 0
        for op in rank:
            alive += (op.kind in "BD") - (op.kind == "W")
            most = max(most, alive)
            alive -= op.kind == "D"
    return most


def dropped_sets(ops: Sequence[Op], limit: int) -> set[Unit]:
    """Return the fewest sets of a rank that must be recomputed: of too many, the one needed last is dropped.

    A dropped set is alive again from its R, which stands before its backward, so what is removed is its life from F to R.
    """
    needed = {op[1:]: place for place, op in enumerate(ops) if op.kind in "BD"}
    kept: set[Unit] = set()
    dropped: set[Unit] = set()
    in_backward = 0
    for op in ops:
        unit = op[1:]
        if op.kind == "F":
            kept.add(unit)
        elif op.kind in "BD":
            kept.discard(unit)
            in_backward += 1
        while len(kept) + in_backward > limit:
            last = max(kept, key=needed.__getitem__)
            kept.remove(last)
            dropped.add(last)
        in_backward -= op.kind in "WD"
    return dropped


def _with_recompute(ops: Sequence[Op], dropped: Collection[Unit]) -> Iterator[Op]:
    for op in ops:
        if op.kind in "BD" and op[1:] in dropped:
            yield op._replace(kind="R")
        yield op
