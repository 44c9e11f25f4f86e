"""Cache what was read from source files between processes, for as long as those files have the same size and time.

A process then only asks for the state of the files. One file of JSON per Megatron in the user's cache folder; one that
cannot be read or written only costs the time to read the sources again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from threading import RLock
from typing import Any, Final

from mindspeed._version import __version__
from mindspeed.engine.inspection.source import files_consulted, state_of
from mindspeed.files.cache_folder import cache_folder, distrust, make_private, remove_oldest
from mindspeed.files.text_files import write_files
from mindspeed.problems import PlatformError

_FORMAT: Final = 4
"""Part of the file's name; goes up when sites, contracts or arguments are read in another way."""
_KEPT: Final = 20
"""Files that stay, each of one Megatron read by one version of mindspeed."""


class SourceCache:
    """Values that JSON can hold by name, each with the source files that it was read from."""

    def __init__(self, folders: Sequence[Path]) -> None:
        origin = "\n".join((*map(str, folders), __version__, str(_FORMAT)))
        self._file = cache_folder() / f"megatron-{blake2b(origin.encode(), digest_size=8).hexdigest()}.json"
        self._states: dict[str, list[int]] = {}
        self._rows: dict[str, tuple[Any, list[str]]] = {}
        self._new = False
        self._lock = RLock()  # several threads may plan at once
        with suppress(OSError, ValueError, KeyError, TypeError):
            if distrust(self._file, self._file.parent) is not None:
                raise PermissionError
            data = json.loads(self._file.read_text(encoding="utf-8"))
            rows = {name: (value, files) for name, (value, files) in data["rows"].items()}
            self._states, self._rows = dict(data["files"]), rows
        self.revalidate()

    def revalidate(self) -> None:
        """Read the state of every file again, and forget the contents of changed files."""
        with self._lock:
            changed = {file for file, state in self._states.items() if not _unchanged(file, state)}
            if changed:
                self._states = {file: state for file, state in self._states.items() if file not in changed}
                self._rows = {name: row for name, row in self._rows.items() if changed.isdisjoint(row[1])}

    def get(self, name: str, read: Callable[[], Any]) -> Any:
        """Return the cached value of a name, else the one that ``read`` gives, which is kept if source files decide it."""
        with self._lock:
            if name in self._rows:
                return self._rows[name][0]
            with files_consulted() as files:
                value = read()
            if files:
                self._states |= {file: list(state_of(file)) for file in files}
                self._rows[name] = (value, sorted(files))
                self._new = True
            return value

    def save(self) -> None:
        """Write what is new."""
        with self._lock, suppress(PlatformError, OSError):
            if self._new:
                self._new = False
                make_private(self._file.parent)
                if distrust(self._file, self._file.parent) is not None:
                    raise PermissionError
                write_files({self._file: json.dumps({"files": self._states, "rows": self._rows})})
                self._file.chmod(0o600)
                remove_oldest(self._file.parent.glob("megatron-*.json"), _KEPT)


@lru_cache(maxsize=8)
def source_cache_of(*folders: Path) -> SourceCache:
    """The cache of the contents of some folders, with the state of their files at the last check."""
    return SourceCache(folders)


def _unchanged(file: str, state: Sequence[int]) -> bool:
    try:
        return list(state_of(file)) == state
    except OSError:
        return False
