"""The support matrix: which versions and machines mindspeed was tried on, and which never. Light."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from mindspeed._version import __version__
from mindspeed.plugins.tables import table_beside


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


@dataclass(frozen=True, slots=True)
class PythonResult:
    """Hold what `make test-pythons` found under a Python: checks and claims by name, each ``passed`` or the reason why not."""

    python: str
    torch: str
    checks: dict[str, str]
    claims: dict[str, str]

    @property
    def short(self) -> str:
        """The version without its last number, as in ``3.12``."""
        return self.python.rpartition(".")[0]

    @property
    def support(self) -> Support:
        """The row of this Python."""
        every = {**self.checks, **{f"claims beside {version}": answer for version, answer in self.claims.items()}}
        if failed := [name for name, answer in every.items() if answer.startswith("fails")]:
            return Support("Python", self.short, "fails", f"`make test-pythons`: {', '.join(failed)}")
        passed = ", ".join(version for version, answer in self.claims.items() if answer == "passed")
        checks = ", ".join(name for name, answer in self.checks.items() if answer == "passed")
        claims = f"; claims beside megatron-core {passed}" if passed else ""
        missing = ", ".join(name for name, answer in every.items() if answer == "not run")
        return Support("Python", self.short, "tested, long", checks + claims + (f"; not run: {missing}" if missing else ""))


PYTHON_RESULTS: Final = Path(__file__).with_name("python_results.json")


def python_results() -> tuple[PythonResult, ...]:
    """Return what was found under each Python, lowest version first."""
    found = json.loads(PYTHON_RESULTS.read_text(encoding="utf-8"))
    return tuple(PythonResult(**row) for row in found.values())


def _cells() -> Iterator[Support]:
    """The rows of the matrix, where those of Pythons follow the first one, which is written by hand."""
    yield Support("mindspeed", __version__, "tested")
    for row in _MATRIX["cells"]:
        yield Support(*row)
        if row[0] == "Python":
            yield from (result.support for result in python_results())


_MATRIX: Final = table_beside(__file__)
MEANING: Final[dict[str, str]] = _MATRIX["states"]
CELLS: Final = tuple(_cells())
COMBINATIONS: Final = tuple(Combination(*row) for row in _MATRIX["combinations"])


def to_json() -> dict[str, Any]:
    """``{"cells": [...], "combinations": [...], "states": {...}}``."""
    return {
        "cells": [asdict(cell) for cell in CELLS],
        "combinations": [asdict(row) for row in COMBINATIONS],
        "states": MEANING,
    }
