"""The working folder of a rank that is started for a trial."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def inside(folder: str) -> Iterator[None]:
    """Make a folder the current one, so that files which features write, such as traces, go there."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
