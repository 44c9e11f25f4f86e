"""Files of operators: what has more than a reference on a platform, C++ sources and their hashes. Nothing is imported."""

from __future__ import annotations

import os
import re
import sys
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from types import FunctionType
from typing import Final

_OPS: Final = Path(__file__).resolve().parent
SOURCES: Final = Path(os.environ.get("MINDSPEED_CSRC") or _OPS.parent / "csrc")
"""C++ sources; in a checkout this folder of the package is a link to ``csrc`` beside it."""


def reference_only() -> bool:
    """Return whether ``MINDSPEED_OPS=reference`` selects the references on every platform."""
    return os.environ.get("MINDSPEED_OPS") == "reference"


@lru_cache(maxsize=8)
def python_variants(platform: str) -> frozenset[str]:
    """Operators with kernels called from Python: the files of ``mindspeed/ops/<platform>``."""
    return frozenset(file.stem for file in (_OPS / platform).glob("*.py") if file.stem != "__init__")


@lru_cache(maxsize=8)
def native_variants(platform: str) -> frozenset[str]:
    """Operators with kernels in C++: the files of ``csrc/<platform>``."""
    return frozenset(file.stem for file in (SOURCES / platform).glob("*.cpp"))


def variants(platform: str) -> frozenset[str]:
    """Operators with a specific implementation on ``platform``, built here or not."""
    return python_variants(platform) | native_variants(platform)


def has_variant(op: str, platform: str) -> bool:
    """Return whether ``op`` can run something else than its plain-torch reference on ``platform``, built here or not."""
    return not reference_only() and op in variants(platform)


def public_functions(name: str) -> list[FunctionType]:
    """Return the function of a loaded operator that has its name, else all public ones: their calls show that it runs."""
    module = sys.modules.get(f"mindspeed.ops.{name}")
    public = {key: value for key, value in vars(module).items() if not key.startswith("_")} if module else {}
    functions = {key: f for key, f in public.items() if isinstance(f, FunctionType) and f.__module__ == f"mindspeed.ops.{name}"}
    return [functions[name]] if name in functions else list(functions.values())


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
