"""Pictures of features: a module by the name of the feature's folder has ``PICTURES``, and ``LINES`` of Markdown below them."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

from mindspeed.workbench.pictures.drawing import Picture


def pictures_of(feature: str) -> Sequence[Picture]:
    """Return the pictures of a feature."""
    found: Sequence[Picture] = _of(feature, "PICTURES")
    return found


def lines_of(feature: str) -> list[str]:
    """Return what a feature adds below its pictures as one block; none without it."""
    lines = list(_of(feature, "LINES"))
    return ["\n".join(lines)] if lines else []


def _of(feature: str, name: str) -> Any:
    module = f"{__name__}.{feature.replace('-', '_')}"
    return getattr(importlib.import_module(module), name, ()) if importlib.util.find_spec(module) else ()
