"""Text files that a command makes for its user: complete, or as they were before."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from mindspeed.files.cache_folder import make_private
from mindspeed.problems import PlatformError, Problem, advice


def replace_text(path: Path, text: str, private: bool = False) -> None:
    """Write a file so that a reader finds it complete, whenever the writing process ends. Raises OSError.

    ``private``: only this user can read and write it.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.new")
    draft.write_text(text, encoding="utf-8")
    if private:
        draft.chmod(0o600)
    os.replace(draft, path)


def write_files(texts: Mapping[Path, str], fix: str = "", is_private: bool = False) -> None:
    """Write every text to a temporary file next to its place, then rename all of them; missing folders are made.

    Other users cannot enter a folder that ``is_private``. Raises PlatformError (MS516) with the path that cannot be written;
    files that existed are then unchanged.
    """
    drafts: dict[Path, Path] = {}
    path = Path()
    try:
        for path, text in texts.items():
            place = path.resolve()  # a link stays a link
            if is_private:
                make_private(place.parent)
            else:
                place.parent.mkdir(parents=True, exist_ok=True)
            special = place.exists() and not place.is_file()
            draft = place if special else place.with_name(f".{place.name}.{os.getpid()}.new")
            drafts[place] = draft
            draft.write_text(text, encoding="utf-8")
        for place, draft in drafts.items():
            if draft != place:
                os.replace(draft, place)
    except OSError as error:
        for place, draft in drafts.items():
            if draft != place:
                with suppress(OSError):
                    draft.unlink()
        blocked = isinstance(error, (FileExistsError, NotADirectoryError))
        text = f"{path} cannot be written: {'a part of its path is a file' if blocked else error.strerror}"
        raise PlatformError([Problem("MS516", text, fix=advice(fix))]) from error
