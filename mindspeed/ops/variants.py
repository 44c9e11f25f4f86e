"""Which operators have more than their reference on a platform: known from the files, nothing is imported."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Final

_OPS: Final = Path(__file__).resolve().parent


@lru_cache(maxsize=8)
def variants(platform: str) -> frozenset[str]:
    """Operators with an implementation of their own on ``platform``: the files of ``mindspeed/ops/<platform>``."""
    return frozenset(file.stem for file in (_OPS / platform).glob("*.py") if file.stem != "__init__")


def has_variant(op: str, platform: str) -> bool:
    """Whether ``op`` runs something else than its plain-torch reference on ``platform``."""
    return op in variants(platform)
