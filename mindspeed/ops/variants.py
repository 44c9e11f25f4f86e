"""Find the operators with more than a reference on a platform from their files, and their functions. Nothing is imported."""

from __future__ import annotations

import os
import sys
from functools import lru_cache
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
