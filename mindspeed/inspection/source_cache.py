"""Cache what was read from source files between processes, for as long as those files have the same size and time.

A process then only asks for the state of the files. One file of JSON per Megatron in the user's cache folder; one that
cannot be read or written only costs the time to read the sources again.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import Any, Final, TypeVar

from mindspeed._version import __version__
from mindspeed.inspection.source import state_of
from mindspeed.plugins.cache_folder import cache_folder

_FORMAT: Final = 3
"""Part of the file's name; goes up when sites, contracts or arguments are read in another way."""

T = TypeVar("T")
_caches: dict[tuple[str, ...], SourceCache] = {}


class SourceCache:
    """Values that JSON can hold by name, each with the source files that it was read from."""

    def __init__(self, origin: tuple[str, ...]) -> None:
        name = blake2b("\n".join((*origin, __version__, str(_FORMAT))).encode(), digest_size=8).hexdigest()
        self._file = cache_folder() / f"megatron-{name}.json"
        self._states: dict[str, list[int]] = {}
        self._rows: dict[str, tuple[Any, list[str]]] = {}
        self._decoded: dict[str, Any] = {}
        self._new = False
        with suppress(OSError, ValueError, KeyError, TypeError):
            data = json.loads(self._file.read_text(encoding="utf-8"))
            rows = {name: (value, files) for name, (value, files) in data["rows"].items()}
            self._states, self._rows = dict(data["files"]), rows

    def revalidate(self) -> None:
        """Ask for the state of every file, and forget what was read from one that has changed."""
        changed = {file for file, state in self._states.items() if not _unchanged(file, state)}
        if changed:
            self._states = {file: state for file, state in self._states.items() if file not in changed}
            self._rows = {name: row for name, row in self._rows.items() if changed.isdisjoint(row[1])}
            self._decoded.clear()

    def get(self, name: str, decode: Callable[[Any], T]) -> T | None:
        """Return the decoded value of a name, decoded once in this process; None when no valid one is cached."""
        if name in self._rows and name not in self._decoded:
            self._decoded[name] = decode(self._rows[name][0])
        return self._decoded.get(name)

    def put(self, name: str, value: Any, files: Collection[str]) -> None:
        """Remember a value that was read from these files."""
        for file in files:
            self._states[file] = list(state_of(file))
        self._rows[name] = (value, sorted(files))
        self._decoded.pop(name, None)
        self._new = True

    def save(self) -> None:
        """Write what is new."""
        if not self._new:
            return
        with suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self._file.parent, prefix=self._file.stem)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump({"files": self._states, "rows": self._rows}, file)
            os.replace(name, self._file)
            self._new = False


def source_cache_of(origin: Iterable[object], now: bool = True) -> SourceCache:
    """The memory of what lies in some folders, with the state of its files ``now``, or when it was last asked for."""
    key = tuple(map(str, origin))
    known = key in _caches
    if not known:
        _caches[key] = SourceCache(key)
    if now or not known:
        _caches[key].revalidate()
    return _caches[key]


def _unchanged(file: str, state: Sequence[int]) -> bool:
    try:
        return list(state_of(file)) == state
    except OSError:
        return False
