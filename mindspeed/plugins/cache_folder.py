"""The folder of everything that mindspeed remembers between processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

CACHE_VARIABLE: Final = "MINDSPEED_CACHE"
"""Environment variable that names the folder."""


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


def why_unwritable(folder: Path) -> str:
    """Return the reason why a folder cannot be made or used, or ''."""
    existing = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not existing.is_dir():
        return f"{existing} is not a folder"
    return "" if os.access(existing, os.R_OK | os.W_OK | os.X_OK) else "permission denied"
