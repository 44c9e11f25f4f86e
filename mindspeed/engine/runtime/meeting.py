"""Meetings in a store that outlives ranks: every start of a job has one, which its rank 0 opens.

The restart counts of torchrun do not tell starts apart, because each agent counts only its own.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Final

from mindspeed.engine.runtime.presence import do_without

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

VERDICT: Final = "verdict"
"""Key of what a meeting came to: ``AGREED``, ``MOVED``, or a problem."""
AGREED: Final = "agreed"
MOVED: Final = "moved"
_NUMBER: Final = "meeting"
_OPENED: Final = "opened"
_NEXT: Final = "next"


class MovedError(Exception):
    """Rank 0 of a later start has opened another meeting."""


def open_meeting(store: Store) -> int:
    """Open the meeting of this start as its rank 0, and send ranks that wait in an earlier one there. Returns its number."""
    number = int(store.add(_NUMBER, 0))
    earlier = meeting(store, number)
    if earlier.add(_OPENED, 1) == 1:
        return number
    number = int(store.add(_NUMBER, 1))
    meeting(store, number).add(_OPENED, 1)
    earlier.compare_set(VERDICT, "", MOVED)
    do_without(earlier)
    earlier.set(_NEXT, "")
    return number


def find_meeting(store: Store, after_agreement: timedelta, after_failure: timedelta) -> int:
    """Return the number of the newest meeting that is not over, as any other rank.

    A meeting that is over belongs to an earlier start: wait for the next one. Only a failure may be of this start, so wait
    less, then return that meeting. Raises RuntimeError where rank 0 does not come.
    """
    while True:
        number = newest(store)
        latest = meeting(store, number)
        if not latest.check([VERDICT]):
            return number
        has_failed = latest.get(VERDICT).decode() not in (AGREED, MOVED)
        try:
            latest.wait([_NEXT], after_failure if has_failed else after_agreement)
        except RuntimeError:
            if has_failed:
                return number
            raise


def newest(store: Store) -> int:
    """Return the number of the newest meeting."""
    return int(store.add(_NUMBER, 0))


def meeting(store: Store, number: int) -> Store:
    """Return the part of a store that belongs to a meeting."""
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    return PrefixStore(str(number), store)
