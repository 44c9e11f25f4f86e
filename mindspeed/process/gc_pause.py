"""The garbage collector, out of the way of work that leaves nothing to collect."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_froze = False
"""Whether frozen objects have been found. Counting them walks all of them, so it is done only until then."""


@contextmanager
def collector_paused() -> Iterator[None]:
    """Without the collector: one full collection in a large process costs more than a resolution or an activation.

    Loading features is such work, too: their classes stay.
    """
    global _froze
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            _froze = _froze or gc.get_freeze_count() > 0
            if not _froze:  # freezing and unfreezing moves what was made to the oldest generation at no cost
                gc.freeze()
                gc.unfreeze()
            gc.enable()
