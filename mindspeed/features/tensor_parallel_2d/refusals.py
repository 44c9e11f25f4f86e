"""Optimizers that weights with two split dimensions do not fit. Light, without torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

from mindspeed.features.tensor_parallel_2d.conditions import MUON, NAME, NOT_MUON
from mindspeed.plugins import Feature, MindSpeedError, Problem


def muon_optimizers(feature: Feature[Any], optimizer: Any) -> Iterator[str]:
    """Say that a built optimizer is, or contains, one that orthogonalizes weights."""
    members = getattr(optimizer, "chained_optimizers", [optimizer])
    if any("muon" in str(getattr(getattr(member, "config", None), "optimizer", "")) for member in members):
        yield MUON


def refusing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that makes a Muon optimizer, which a script may call itself. Raises MS304."""

    @wraps(original)
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise MindSpeedError([Problem("MS304", f"{NAME}: {MUON}", (NAME,), fix=NOT_MUON)])

    return refuse
