"""The folder of everything that mindspeed remembers between processes."""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from mindspeed.problems import Fix, MindSpeedError, Problem

CACHE_VARIABLE: Final = "MINDSPEED_CACHE"
"""Environment variable that names the folder."""
_OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH


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


def make_private(folder: Path) -> None:
    """Make a folder, and those above it that are missing, such that only this user can enter it."""
    for missing in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)


def remove_oldest(files: Iterable[Path], kept: int) -> None:
    """Remove the least recently written of some files, so that ``kept`` stay. Raises OSError where one cannot be removed."""
    for old in sorted(files, key=lambda file: file.stat().st_mtime)[:-kept]:
        old.unlink(missing_ok=True)


def distrust(path: Path, cache: Path) -> Problem | None:
    """MS518 for the first of the folder ``cache`` and what lies between it and ``path`` that other users could have written.

    Symbolic links below ``cache`` are refused too. None where everything is this user's or root's, or does not exist.
    """
    root = Path(os.path.realpath(cache))
    places = [root]
    for part in path.relative_to(cache).parts:
        places.append(places[-1] / part)
    return next((problem for place in places if (problem := _distrusted(place)) is not None), None)


def require_trusted(*paths: Path) -> None:
    """Raise MindSpeedError with MS518 for a path in the cache that `distrust` names; paths elsewhere are the user's choice."""
    cache = cache_folder()
    if problems := [found for path in paths if path.is_relative_to(cache) and (found := distrust(path, cache)) is not None]:
        raise MindSpeedError(problems[:1])


def _distrusted(place: Path) -> Problem | None:
    try:
        found = place.lstat()
    except OSError:
        return None
    name = shlex.quote(str(place))
    if stat.S_ISLNK(found.st_mode):
        return untrusted(f"{place} is a symbolic link", f"rm {name}")
    if found.st_uid not in (os.getuid(), 0):
        text = f"{place} belongs to user {found.st_uid}, who is neither the current user nor root"
        return untrusted(text, f"rm -r {name}, or {CACHE_VARIABLE}=FOLDER with a folder of the current user")
    if found.st_mode & _OTHERS_WRITE:
        text = f"{place} is writable for other users (mode {stat.S_IMODE(found.st_mode):04o})"
        return untrusted(text, f"chmod -R go-w {name}, if its contents are trusted")
    return None


def untrusted(reason: str, fix: str) -> Problem:
    """MS518 for a part of the cache."""
    return Problem("MS518", f"{reason}; nothing is loaded from there", fix=Fix.advise(fix))


def why_unwritable(folder: Path) -> str:
    """Return the reason why a folder cannot be made or used, or ''."""
    existing = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not existing.is_dir():
        return f"{existing} is not a folder"
    return "" if os.access(existing, os.R_OK | os.W_OK | os.X_OK) else "permission denied"
