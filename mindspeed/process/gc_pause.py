"""The garbage collector, out of the way of work that leaves nothing to collect."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Without the collector: one full collection in a large process costs more than a resolution or an activation.

    Loading features is such work, too: their classes stay.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            if not gc.get_freeze_count():  # freezing and unfreezing moves what was made to the oldest generation at no cost
                gc.freeze()
                gc.unfreeze()
            gc.enable()
