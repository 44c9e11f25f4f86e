"""Let one of several processes make what all of them need."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from filelock import FileLock


def make_once(path: Path, is_made: Callable[[], bool], make: Callable[[], None]) -> None:
    """Call ``make`` unless ``path`` is made already; processes that come later wait for the first.

    The lock lies beside the path, so processes with a file system each make it once on each of these. Raises OSError where the
    folder cannot be written.
    """
    if is_made():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"):
        if not is_made():
            make()
