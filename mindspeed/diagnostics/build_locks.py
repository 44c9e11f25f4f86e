"""Locks of torch's extension builds: who holds each, for how long, and whether anybody will ever release it.

torch makes an empty file ``lock`` in the folder of a build and keeps it open; every other process waits until it is
gone, without a limit. A build that is killed leaves it behind.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

YOUNG: Final = 10.0
"""Seconds in which a lock without a known holder may belong to one that has just started."""


@dataclass(frozen=True, slots=True)
class BuildLock:
    """A lock file; ``holder`` is the process on this host that has it open, 0 when there is none."""

    path: Path
    age: float
    holder: int

    @property
    def stale(self) -> bool:
        """Return whether no process of this host holds it, and none can have just made it."""
        return self.holder == 0 and self.age > YOUNG

    def __str__(self) -> str:
        who = f"held by process {self.holder} on {os.uname().nodename}" if self.holder else "held by no process on this host"
        return f"{self.path} {who}, {_span(self.age)} old"


def extension_cache() -> Path:
    """The folder in which torch builds extensions: ``TORCH_EXTENSIONS_DIR``, else in the user's cache."""
    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(given) if given else Path(cache) / "torch_extensions"


def build_locks(cache: Path | None = None) -> list[BuildLock]:
    """Every lock in torch's extension cache."""
    folder = cache or extension_cache()
    found = sorted({*folder.glob("lock"), *folder.glob("*/lock"), *folder.glob("*/*/lock")}) if folder.is_dir() else []
    locks, now = [], time.time()
    for path in found:
        try:
            state = path.stat()
        except OSError:
            continue  # released meanwhile
        locks.append(BuildLock(path, max(0.0, now - state.st_mtime), _holder(state)))
    return locks


def _holder(state: os.stat_result) -> int:
    """A process of this host that has this file open; those of other users are not visible to all."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            for handle in (process / "fd").iterdir():
                opened = handle.stat()
                if (opened.st_ino, opened.st_dev) == (state.st_ino, state.st_dev):
                    return int(process.name)
        except OSError:
            continue  # it has ended, or is not ours to look at
    return 0


def _span(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
