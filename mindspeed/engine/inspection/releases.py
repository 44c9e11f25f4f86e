"""Recorded Megatron releases: one file ``releases/<version>.json`` each, read without Megatron at hand.

A file has up to three sections: ``targets`` (the contract of every patch target), ``configuration`` (argument names of
Megatron's configuration classes) and ``command_line`` (arguments of Megatron-LM's parser). ``mindspeed patches record``
writes them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Literal

from packaging.version import InvalidVersion, Version

FOLDER: Final = Path(__file__).with_name("releases")
Section = Literal["targets", "configuration", "command_line"]


def release_file(version: str, folder: Path = FOLDER) -> Path:
    return folder / f"{version}.json"


@lru_cache(maxsize=8)
def recorded_releases(section: Section = "targets") -> tuple[str, ...]:
    """Releases whose file has this section, lowest first."""
    versions = sorted((file.stem for file in FOLDER.glob("*.json")), key=Version)
    begin = f'\n"{section}": '  # as `write_release` writes it; to parse every file takes longer than a plan
    return tuple(version for version in versions if begin in release_file(version).read_text(encoding="utf-8"))


def recorded_section(version: str, section: Section) -> tuple[str, Any] | None:
    """``(release, section)`` of the recorded release most like ``version``; None when every recorded one is above."""
    known = nearest(version, recorded_releases(section))
    return (known, read_release(release_file(known))[section]) if known is not None else None


def nearest(version: str, recorded: Iterable[str]) -> str | None:
    """The recorded version that is most like ``version``: the highest that is not above it, of the same minor release if any.

    Patch releases of one minor release are alike, so 0.15.0 is read as 0.15.3 rather than as 0.14.0. None when every
    recorded version is above, or for a malformed version.
    """
    try:
        wanted = Version(version)
    except InvalidVersion:
        return None
    versions = sorted(map(Version, recorded))
    siblings = [known for known in versions if known.release[:2] == wanted.release[:2]]
    below = [known for known in siblings or versions if known <= wanted]
    return str((below[-1:] or siblings[:1])[0]) if below or siblings else None


@lru_cache(maxsize=16)
def read_release(file: Path) -> Mapping[str, Any]:
    """The sections of one file."""
    sections: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return sections


def write_release(file: Path, version: str, sections: Mapping[Section, Mapping[str, Any] | Sequence[Any]]) -> None:
    """Write a release file with one line per target, configuration class and argument, equal for equal sections."""
    parts = [f'"megatron": {json.dumps(version)}']
    for name, content in sections.items():
        if isinstance(content, Mapping):
            rows, (left, right) = [f"{json.dumps(key)}: {json.dumps(row)}" for key, row in content.items()], "{}"
        else:
            rows, (left, right) = [json.dumps(row) for row in content], "[]"
        parts.append(f"{json.dumps(name)}: {left}\n" + ",\n".join(rows) + f"\n{right}")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("{" + ",\n".join(parts) + "}\n", encoding="utf-8")
