"""The C++ sources of operators: which files there are, and hashes of what they say. Light."""

from __future__ import annotations

import re
from hashlib import sha256
from pathlib import Path

from mindspeed.ops.variants import SOURCES


def operator_files(sources: Path = SOURCES) -> list[Path]:
    """The files of operators for the CPU, each named as the module of its reference."""
    return sorted((sources / "cpu").glob("*.cpp"))


def source_files(sources: Path = SOURCES) -> list[Path]:
    """All files that are compiled for the CPU: those of operators, and what they share."""
    return [*operator_files(sources), *sorted((sources / "common").glob("*.cpp"))]


def sources_digest(sources: Path = SOURCES) -> str:
    """A hash of everything that is compiled for the CPU; no path takes part in it."""
    headers = [*sorted((sources / "cpu").glob("*.h")), *sorted((sources / "common").glob("*.h"))]
    return digest(*(part for file in [*source_files(sources), *headers] for part in (file.name, file.read_bytes())))


def source_digest(source: Path) -> str:
    """A hash of one source and of those headers of mindspeed that it includes, directly or not."""
    return digest(*(file.read_bytes() for file in _with_headers(source)))


def _with_headers(source: Path) -> list[Path]:
    """The file and its headers between quotation marks, looked for beside it and in ``common``."""
    found: list[Path] = []
    waiting = [source]
    while waiting:
        file = waiting.pop()
        if file in found:
            continue
        found.append(file)
        for name in re.findall(r'^\s*#\s*include\s*"([^"]+)"', file.read_text(encoding="utf-8"), re.MULTILINE):
            places = (file.parent / name, source.parents[1] / "common" / name)
            waiting += [place.resolve() for place in places if place.is_file()][:1]
    return found


def digest(*parts: str | bytes) -> str:
    """Sixteen hexadecimal digits for these parts."""
    hashed = sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        hashed.update(len(data).to_bytes(8, "little") + data)
    return hashed.hexdigest()[:16]
