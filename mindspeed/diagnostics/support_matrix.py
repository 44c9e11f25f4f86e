"""The support matrix: which versions and machines mindspeed was tried on, and which never. Light."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from mindspeed._version import __version__


@dataclass(frozen=True, slots=True)
class Support:
    """Describe a cell: a version of a component, a state of `MEANING`, and the ground of the state."""

    component: str
    version: str
    state: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Combination:
    """Versions that belong together on one platform. A dash says that the platform does not need the component."""

    platform: str
    megatron: str
    torch: str
    torch_npu: str
    cann: str
    python: str
    hardware: str
    state: str


_MATRIX: Final = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
MEANING: Final[dict[str, str]] = _MATRIX["states"]
CELLS: Final = (Support("mindspeed", __version__, "tested"), *(Support(*row) for row in _MATRIX["cells"]))
COMBINATIONS: Final = tuple(Combination(*row) for row in _MATRIX["combinations"])


def to_json() -> dict[str, Any]:
    """``{"cells": [...], "combinations": [...], "states": {...}}``."""
    return {
        "cells": [asdict(cell) for cell in CELLS],
        "combinations": [asdict(row) for row in COMBINATIONS],
        "states": MEANING,
    }
