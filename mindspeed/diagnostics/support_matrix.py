"""The support matrix: which versions and machines mindspeed was tried on, and which never. Light."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

from mindspeed._version import __version__

TESTED: Final = "tested"
LONG: Final = "tested, long"
STATIC: Final = "read only"
UNTESTED: Final = "not tested"

MEANING: Final = {
    TESTED: "the default tests run on it",
    LONG: "the long tests run on it (`make test-versions`)",
    STATIC: "it is checked from its source or declarations, and never run",
    UNTESTED: "nobody has run it; it is meant to work, or is listed because users ask",
}


@dataclass(frozen=True, slots=True)
class Support:
    """Describe a cell: a version of a component, one of the states above, and the ground of the state."""

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


CELLS: Final = (
    Support("mindspeed", __version__, TESTED),
    Support("megatron-core", "0.16.1", TESTED, "every feature, every layout, Megatron-LM's own script"),
    *(
        Support("megatron-core", version, LONG, "features, layouts, checkpoints")
        for version in ("0.16.0", "0.15.3", "0.15.0", "0.14.0")
    ),
    Support("megatron-core", "0.12.1", STATIC, "`mindspeed patches drift` alone; no feature runs on it"),
    Support("torch", "2.13.0", TESTED, "the CPU build"),
    Support("torch", "2.6 to 2.12", UNTESTED, "the declared minimum is 2.6"),
    Support(
        "torch_npu", "2.6 or newer", UNTESTED, "its absence and a build that cannot be imported are tested; it pins its torch"
    ),
    Support("CANN", "8.3.RC1, 8.5.0, 9.0.0", UNTESTED, "`mindspeed doctor` reads its version files, tested with made-up ones"),
    Support("Python", "3.11", TESTED),
    Support("Python", "3.10", STATIC, "type-checked for it"),
    Support("Python", "3.12, 3.13", UNTESTED),
    Support("hardware", "CPU, x86-64", TESTED, "with gloo, up to 4 processes on one machine"),
    Support("hardware", "CPU, aarch64", UNTESTED),
    Support("hardware", "NVIDIA GPU", UNTESTED, "the platform cuda is almost empty: Megatron runs there by itself"),
    Support("hardware", "Ascend NPU", UNTESTED, "the platform npu calls torch_npu and says so when it is missing"),
    Support("hardware", "several nodes", UNTESTED, "the variables of torchrun and Slurm are tested without nodes"),
)
COMBINATIONS: Final = (
    Combination("cpu", "0.16.1", "2.13.0", "-", "-", "3.11", "x86-64", TESTED),
    *(Combination("cpu", old, "2.13.0", "-", "-", "3.11", "x86-64", LONG) for old in ("0.16.0", "0.15.3", "0.15.0", "0.14.0")),
    Combination("cuda", "0.16.1", "2.6 or newer", "-", "-", "3.10 or newer", "NVIDIA GPU", UNTESTED),
    Combination("npu", "0.16.1", "2.10.0", "2.10.0", "9.0.0", "3.10 or newer", "Ascend NPU", UNTESTED),
    Combination("npu", "0.16.1", "2.9.0", "2.9.0", "8.5.0", "3.10 or newer", "Ascend NPU", UNTESTED),
    Combination("npu", "0.16.1", "2.8.0", "2.8.0", "8.3.RC1", "3.10 or newer", "Ascend NPU", UNTESTED),
)


def to_json() -> dict[str, Any]:
    """``{"cells": [...], "combinations": [...], "states": {...}}``."""
    return {
        "cells": [asdict(cell) for cell in CELLS],
        "combinations": [asdict(row) for row in COMBINATIONS],
        "states": MEANING,
    }
