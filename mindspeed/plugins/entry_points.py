"""Entry points of installed distributions, read from the metadata folders of ``sys.path`` without importing anything.

`importlib.metadata` takes most of a second for 10,000 distributions. Here a folder costs one listing and one small read
per distribution, and a large folder is remembered in the user's cache until it changes. Distributions in zip files are
found through `importlib.metadata`; those that only a meta-path finder of somebody's own knows are not found.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Final, NamedTuple

CACHE_VARIABLE: Final = "MINDSPEED_CACHE"
"""Environment variable that names the folder of everything mindspeed remembers between processes."""

_FORMAT: Final = 1
_WORTH_REMEMBERING: Final = 100
"""Distributions in one folder; fewer are read faster than a cache file."""
_SETTLED: Final = 2.0
"""Seconds. A folder that changed more recently may change again within the resolution of its time stamp."""


class EntryPoint(NamedTuple):
    """``name = reference`` of one distribution."""

    name: str
    reference: str
    distribution: str
    version: str


@dataclass(frozen=True, slots=True)
class _Folder:
    """What one folder of the search path holds: the normalized names of its distributions, and the wanted entry points."""

    distributions: tuple[str, ...]
    entries: tuple[EntryPoint, ...]


def entry_points(group: str, path: Sequence[str] | None = None) -> list[EntryPoint]:
    """The entry points of ``group``, in the order of ``path`` (default: ``sys.path``).

    Of two distributions of one name the first on the path counts, as for imports.
    """
    found: list[EntryPoint] = []
    seen: set[str] = set()
    for place in dict.fromkeys(sys.path if path is None else path):
        folder = _read_place(place or os.curdir, group)
        found += [entry for entry in folder.entries if _normalized(entry.distribution) not in seen]
        seen.update(folder.distributions)
    return found


def cache_folder() -> Path:
    """``MINDSPEED_CACHE``, else ``mindspeed`` in the user's cache folder. It need not exist.

    For a user without a home it is a folder that cannot exist, so that nothing is cached.
    """
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mindspeed"
    except RuntimeError:
        return Path(os.devnull) / "mindspeed"


def _read_place(place: str, group: str) -> _Folder:
    try:
        changed = os.stat(place).st_mtime_ns
        names = os.listdir(place) if os.path.isdir(place) else None
    except OSError:
        return _Folder((), ())
    if names is None:
        return _read_archive(place, group)
    infos = [name for name in names if name.endswith((".dist-info", ".egg-info"))]
    # an egg-info folder is written again in place, which the time stamp of the folder around it does not show
    lasting = len(infos) > _WORTH_REMEMBERING and not any(name.endswith(".egg-info") for name in infos)
    remembered = _recall(place, group, changed) if lasting else None
    if remembered is not None:
        return remembered
    entries = tuple(entry for info in infos for entry in _read_info(place, info, group))
    folder = _Folder(tuple(_normalized(info.rpartition(".")[0].partition("-")[0]) for info in infos), entries)
    if lasting and time.time() - changed / 1e9 > _SETTLED:
        _remember(place, group, changed, folder)
    return folder


def _read_info(place: str, info: str, group: str) -> Iterator[EntryPoint]:
    text = _read(f"{place}/{info}/entry_points.txt")
    if group not in text:
        return
    metadata = _read(f"{place}/{info}/METADATA") or _read(f"{place}/{info}/PKG-INFO")
    name, _, version = info.rpartition(".")[0].partition("-")
    name, version = _field(metadata, "Name") or name, _field(metadata, "Version") or version
    yield from (EntryPoint(key, reference, name, version) for key, reference in _section(text, group))


def _section(text: str, group: str) -> Iterator[tuple[str, str]]:
    here = ""
    for line in map(str.strip, text.splitlines()):
        if line.startswith("["):
            here = line.strip("[] ")
        elif here == group and "=" in line and not line.startswith(("#", ";")):
            name, _, reference = line.partition("=")
            yield name.strip(), reference.partition("[")[0].replace(" ", "")


def _field(metadata: str, name: str) -> str:
    found = re.search(rf"^{name}:[ \t]*(\S.*?)\s*$", metadata, re.MULTILINE)
    return found.group(1) if found else ""


def _read(path: str) -> str:
    """A small text file, or its beginning, or nothing: one read, as there may be thousands of them."""
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return ""
    try:
        return os.read(file, 1 << 16).decode("utf-8", "replace")
    except OSError:
        return ""
    finally:
        os.close(file)


def _read_archive(place: str, group: str) -> _Folder:
    from importlib import metadata

    distributions = list(metadata.distributions(path=[place]))
    entries = (
        EntryPoint(entry.name, entry.value, distribution.name, distribution.version)
        for distribution in distributions
        for entry in distribution.entry_points
        if entry.group == group
    )
    return _Folder(tuple(_normalized(distribution.name) for distribution in distributions), tuple(entries))


def _normalized(name: str) -> str:
    plain = name.replace("-", "_").replace(".", "_").lower()
    return re.sub("__+", "_", plain) if "__" in plain else plain


def _cache_file(place: str, group: str) -> Path:
    key = blake2b(f"{group}\0{os.path.abspath(place)}".encode(), digest_size=16).hexdigest()
    return cache_folder() / "entry_points" / f"{key}.json"


def _recall(place: str, group: str, changed: int) -> _Folder | None:
    """What `_remember` wrote for this state of the folder; None when there is no such file, or none that can be read."""
    try:
        data = json.loads(_cache_file(place, group).read_bytes())
        if (data["format"], data["changed"]) != (_FORMAT, changed):
            return None
        return _Folder(tuple(data["distributions"]), tuple(EntryPoint(*entry) for entry in data["entries"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _remember(place: str, group: str, changed: int, folder: _Folder) -> None:
    """Write the cache file in one step, so that any number of processes may do the same; without a cache all still works."""
    data = {"format": _FORMAT, "changed": changed, "distributions": folder.distributions, "entries": folder.entries}
    file = _cache_file(place, group)
    unfinished = file.with_name(f"{file.name}.{os.getpid()}")
    with suppress(OSError):
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        unfinished.write_text(json.dumps(data), encoding="utf-8")
        os.replace(unfinished, file)
