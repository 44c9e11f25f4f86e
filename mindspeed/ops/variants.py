"""Find the operators with more than a reference on a platform from their files; nothing is imported."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from typing import Final

_OPS: Final = Path(__file__).resolve().parent
SOURCES: Final = Path(os.environ.get("MINDSPEED_CSRC") or _OPS.parent / "csrc")
"""C++ sources; in a checkout this folder of the package is a link to ``csrc`` beside it."""


def reference_only() -> bool:
    """Return whether ``MINDSPEED_OPS=reference`` asks for the references on every platform."""
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
    """Operators with an implementation of their own on ``platform``, built here or not."""
    return python_variants(platform) | native_variants(platform)


def has_variant(op: str, platform: str) -> bool:
    """Return whether ``op`` can run something else than its plain-torch reference on ``platform``, built here or not."""
    return not reference_only() and op in variants(platform)
