"""Tell which C++ sources need an instruction set, and whether this processor has it. Light."""

from __future__ import annotations

import platform
from functools import lru_cache
from typing import Final

from mindspeed.files.tables import table_beside

_TABLE: Final = table_beside(__file__)
SETS: Final[dict[str, tuple[str, ...]]] = {name: tuple(flags) for name, flags in _TABLE["sets"].items()}
"""Instruction sets, and the processor flags that each consists of."""
NEEDED: Final[dict[str, str]] = _TABLE["sources"]
"""Sources without a portable form, by file name without suffix, and the set that each needs."""


def needed(source: str) -> str:
    """Return the instruction set that a source needs, or '' for a portable one."""
    return NEEDED.get(source, "")


def missing(source: str) -> str:
    """Return the instruction set that a source needs and this processor lacks, or ''."""
    name = needed(source)
    return "" if not name or instructions().issuperset(SETS[name]) else name


@lru_cache(maxsize=1)
def instructions() -> frozenset[str]:
    """The instruction set of the first processor; reading all of /proc/cpuinfo takes long on large machines."""
    return frozenset(_of_processor("flags", "Features").split())


def processor_model() -> str:
    """Return the name of the first processor as the kernel gives it, or the architecture where it gives none."""
    return _of_processor("model name", "CPU part") or platform.machine()


def _of_processor(*keys: str) -> str:
    """Return the first value of one of these keys in /proc/cpuinfo, or ''."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            line = next((line for line in lines if line.startswith(keys)), "")
    except OSError:
        line = ""
    return line.partition(":")[2].strip()
