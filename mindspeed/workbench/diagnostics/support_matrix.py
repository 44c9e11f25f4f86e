"""The support matrix: which versions and machines mindspeed was tried on, and which never. Light."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mindspeed._version import __version__
from mindspeed.files.tables import table_beside


@dataclass(frozen=True, slots=True)
class Support:
    """Describe a cell: a version of a component, a state of `MEANING`, and the ground of the state."""

    component: str
    version: str
    state: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Combination:
    """Versions that belong together on one platform. A dash means that the platform does not need the component."""

    platform: str
    megatron: str
    torch: str
    torch_npu: str
    cann: str
    python: str
    hardware: str
    state: str


PYTHON_RESULTS: Final = Path(__file__).with_name("python_results.json")


def python_results() -> dict[str, dict[str, Any]]:
    """Return what `make test-pythons` found under each Python, lowest version first."""
    found: dict[str, dict[str, Any]] = json.loads(PYTHON_RESULTS.read_text(encoding="utf-8"))
    return found


ENGINE_RESULTS: Final = Path(__file__).with_name("engine_results.json")


def engine_results() -> dict[str, str]:
    """Return what the runs of each feature on Transformer Engine's layers found."""
    found: dict[str, str] = json.loads(ENGINE_RESULTS.read_text(encoding="utf-8"))
    return found


BACKEND_RESULTS: Final = Path(__file__).with_name("backend_results.json")


def backend_results() -> dict[str, dict[str, str]]:
    """Return what the runs of each feature with communication found, by the rules of a backend."""
    found: dict[str, dict[str, str]] = json.loads(BACKEND_RESULTS.read_text(encoding="utf-8"))
    return found


VERSION_RESULTS: Final = Path(__file__).with_name("version_results.json")


def version_results() -> dict[str, dict[str, Any]]:
    """Return for each Megatron its Python, its torch, and ``passed`` or why not for each feature, also on a HybridModel."""
    found: dict[str, dict[str, Any]] = json.loads(VERSION_RESULTS.read_text(encoding="utf-8"))
    return found


KERNEL_RESULTS: Final = Path(__file__).with_name("kernel_results.json")


def kernel_results() -> dict[str, dict[str, Any]]:
    """Return for each feature and device the share of its calls that a kernel takes, and the notes of its plan there."""
    found: dict[str, dict[str, Any]] = json.loads(KERNEL_RESULTS.read_text(encoding="utf-8"))
    return found


def _cells() -> Iterator[Support]:
    """The rows of the matrix, where those of Pythons follow the first one, which is written by hand."""
    yield Support("mindspeed", __version__, "tested")
    for row in _MATRIX["cells"]:
        yield Support(*row)
        if row[0] == "Python":
            yield from (Support("Python", version, made["state"], made["note"]) for version, made in python_results().items())


_MATRIX: Final = table_beside(__file__)
MEANING: Final[dict[str, str]] = _MATRIX["states"]
CELLS: Final = tuple(_cells())
COMBINATIONS: Final = tuple(Combination(*row) for row in _MATRIX["combinations"])
