"""The working folder of a rank that is started for a trial."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory


@contextmanager
def scratch_folder() -> Iterator[None]:
    """Make a temporary folder the current one, so that files which features write, such as traces, go there."""
    before = os.getcwd()
    with TemporaryDirectory(prefix="mindspeed-trial-") as folder:
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)
