"""Which variant of each operator runs on this machine, and why not a better one. torch is not imported."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from mindspeed.ops import OPERATORS, libraries
from mindspeed.ops.compiler import find_compiler
from mindspeed.ops.reasons import reason
from mindspeed.ops.variants import native_variants, python_variants, reference_only

REFERENCE: Final = "reference"
CPP: Final = "C++"

_DEVICES: Final = {"cuda": "/dev/nvidia[0-9]*", "npu": "/dev/davinci[0-9]*"}
_OPS: Final = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True)
class Standing:
    """One operator on one platform: its best ``variant``, what ``runs`` on this machine, and why not the former.

    ``runs`` is empty when this machine is not one of that platform.
    """

    name: str
    platform: str
    variant: str
    runs: str
    why: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def standings(platform: str) -> list[Standing]:
    """Every public operator on a platform, in the order of `OPERATORS`."""
    obstacle = _obstacle(platform)
    return [_standing(op, platform, obstacle) for op in OPERATORS]


def variant(op: str, platform: str) -> str:
    """The best variant that is declared for a platform: C++, Triton, torch_npu, torch (its own kernels), or reference."""
    if platform == "cpu" and op in native_variants(platform):
        return CPP
    if op not in python_variants(platform):
        return REFERENCE
    if platform == "npu":
        return "torch_npu"
    return "Triton" if "mindspeed.ops.triton" in (_OPS / platform / f"{op}.py").read_text(encoding="utf-8") else "torch"


def running(platform: str) -> Callable[[str, str], bool]:
    """``(op, platform) -> bool``: whether a call on this machine runs more than the reference. Looks once, when first asked."""
    looked: list[Callable[[str], str]] = []

    def runs(op: str, where: str) -> bool:
        if not looked:
            looked.append(_obstacle(platform))
        return variant(op, where) != REFERENCE and not looked[0](op)

    return runs


def is_here(platform: str) -> bool:
    """Whether this machine has a device of that platform."""
    return platform not in _DEVICES or bool(glob.glob(_DEVICES[platform]))


def _standing(op: str, platform: str, obstacle: Callable[[str], str]) -> Standing:
    best = variant(op, platform)
    if best == REFERENCE:
        return Standing(op, platform, best, REFERENCE if is_here(platform) else "", reason(op, platform))
    why = obstacle(op)
    runs = best if not why else REFERENCE if is_here(platform) else ""
    return Standing(op, platform, best, runs, why)


def _obstacle(platform: str) -> Callable[[str], str]:
    """``op -> why its variant does not run``, with everything that is the same for all operators found out once."""
    if reference_only():
        return lambda op: "MINDSPEED_OPS is reference"
    if not is_here(platform):
        device = {"cuda": "GPU", "npu": "NPU"}[platform]
        return lambda op: f"there is no {device} on this machine"
    packages = {"cuda": {"Triton": "triton"}, "npu": {"torch_npu": "torch_npu"}}.get(platform, {})
    lacking = {variant: name for variant, name in packages.items() if find_spec(name) is None}
    library = lru_cache(maxsize=1)(_library)

    def of(op: str) -> str:
        kind = variant(op, platform)
        if kind in lacking:
            return f"{lacking[kind]} is not installed"
        if kind != CPP:
            return ""
        operators, why = library()
        return "" if op in operators else why

    return of


def _library() -> tuple[frozenset[str], str]:
    """Operators in the library that fits this process, and why there is none."""
    torch = libraries.torch_version()
    if torch is None:
        return frozenset(), "torch is not installed"
    key = libraries.wanted(torch)
    if (built := libraries.find(key)) is not None:
        return frozenset(built.operators), "not in the library"
    other = libraries.nearest(key)
    what = libraries.why_not(key, other) if other is not None else "not built"
    if find_compiler(os.environ.get("CXX")) is None:
        return frozenset(), f"{what}, and there is no C++ compiler here"
    return frozenset(), f"{what}: mindspeed ops build"
