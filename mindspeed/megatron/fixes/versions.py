"""Megatron's version questions."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

from megatron.core.utils import get_te_version


def false_without_engine(is_te_min_version: Callable[..., bool]) -> Callable[..., bool]:
    """``is_te_min_version``: no version satisfies a minimum where Transformer Engine is not installed."""

    @wraps(is_te_min_version)
    def is_min_version(version: str, check_equality: bool = True) -> bool:
        return get_te_version() is not None and is_te_min_version(version, check_equality)

    return is_min_version
