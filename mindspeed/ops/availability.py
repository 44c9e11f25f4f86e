"""Find the variant of each operator that runs on this machine, and the reason against a better one, without torch."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from mindspeed.files.cache_folder import cache_folder, why_unwritable
from mindspeed.ops import OPERATORS, build_cache, speeds
from mindspeed.ops.build_cache import Built
from mindspeed.ops.compiler import find_compiler
from mindspeed.ops.instruction_sets import missing, needed
from mindspeed.ops.speeds import Speed
from mindspeed.ops.variants import has_variant, native_variants, python_variants, reference_only

REFERENCE: Final = "reference"
CPP: Final = "C++"

_PACKAGES: Final = {"Triton": "triton", "torch_npu": "torch_npu"}
"""Packages that kinds of variants need."""
_WORDS: Final = {"cuda": "GPU", "npu": "NPU"}
_DEVICES: Final = {"cuda": "/dev/nvidia[0-9]*", "npu": "/dev/davinci[0-9]*"}
_OPS: Final = Path(__file__).resolve().parent

_COMPOSED: Final = "it combines the device's matrix products and collectives"
EVERYWHERE: Final = {
    "ffn": "it combines the device's matrix products and an activation",
    "lcal_coc": _COMPOSED,
    "npu_all_to_all_all_gather_bmm": _COMPOSED,
    "npu_bmm_reduce_scatter_all_to_all": _COMPOSED,
    "npu_grouped_mat_mul_all_reduce": _COMPOSED,
    "npu_mm_all_reduce_add_rms_norm": _COMPOSED,
    "npu_mm_all_reduce_add_rms_norm_": "it is npu_mm_all_reduce_add_rms_norm writing into its argument",
}
BY_PLATFORM: Final[dict[tuple[str, str], str]] = {
    ("logit_statistics", "npu"): "torch_npu has no such kernel",
    ("quant_gmm", "cuda"): "no Triton kernel for integer products exists yet",
}

NOT_YET: Final = "no kernel exists yet"


@dataclass(frozen=True, slots=True)
class VariantStatus:
    """Describe an operator on a platform: its best ``variant``, what ``runs`` on this machine, and why not the former.

    ``runs`` is empty when this machine is not one of that platform. ``command`` mends it.
    """

    name: str
    platform: str
    variant: str
    runs: str
    reason: str
    command: str = ""
    speeds: tuple[Speed, ...] = ()

    @property
    def measured(self) -> str:
        """The speed of the operator here over that without it, for each measured type."""
        return ", ".join(f"{speed.label} {speed.ratio:.1f}x" for speed in self.speeds)

    @property
    def why(self) -> str:
        return f"{self.reason}: {self.command}" if self.command else self.reason

    @property
    def needs(self) -> str:
        """The instruction set without which the variant does not run; '' for one that every processor runs."""
        return needed(self.name) if self.variant == CPP else ""

    @property
    def label(self) -> str:
        return label(self.name, self.variant)

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("name", "platform", "variant", "needs", "runs", "why", "speeds")}


def standings(platform: str) -> list[VariantStatus]:
    """Every public operator on a platform, in the order of `OPERATORS`."""
    machine = _Machine(platform)
    return [_standing(op, machine) for op in OPERATORS]


def variant(op: str, platform: str) -> str:
    """The best variant that is declared for a platform: C++, Triton, torch_npu, torch (built-in kernels), or reference."""
    if platform == "cpu" and op in native_variants(platform):
        return CPP
    if op not in python_variants(platform):
        return REFERENCE
    if platform == "npu":
        return "torch_npu"
    return "Triton" if "mindspeed.ops.triton" in (_OPS / platform / f"{op}.py").read_text(encoding="utf-8") else "torch"


def label(op: str, kind: str) -> str:
    """Return a variant with the instruction set that it needs: "C++ (AVX-512)"."""
    return f"{kind} ({needed(op)})" if kind == CPP and needed(op) else kind


def running(platform: str) -> Callable[[str, str], bool]:
    """``(op, platform) -> bool``: whether a call on this machine runs more than the reference. Looked up once, on first use.

    On a machine that cannot run the job, what is declared counts: the plan is for another machine.
    """
    machine = _Machine(platform)

    def runs(op: str, where: str) -> bool:
        return has_variant(op, where) and (not machine.can_run or machine.runs(op))

    return runs


def measured(platform: str) -> Callable[[str], tuple[Speed, ...]]:
    """``op -> times``: what was measured of an operator on this machine, in each type. Looked up once, on first use."""
    return _Machine(platform).speeds_of


def kinds(ops: Iterable[str], platform: str) -> dict[str, str]:
    """Map these operators to the variants that run on this machine; nothing where it cannot run a job of that platform."""
    machine = _Machine(platform)
    return {op: machine.kind(op) for op in sorted(ops)} if machine.can_run else {}


def build_obstacle(platform: str) -> str:
    """Return the reason why C++ operators that are not built cannot be built where `mindspeed ops build` puts them, or ''."""
    if not native_variants(platform) or reference_only() or not (reason := why_unwritable(cache_folder())):
        return ""
    return "" if _Machine(platform).built else f"{cache_folder()} is not writable: {reason}"


def is_here(platform: str) -> bool:
    """Return whether this machine has a device of that platform."""
    return platform not in _DEVICES or bool(glob.glob(_DEVICES[platform]))


def can_run(platform: str) -> bool:
    """Return whether this machine can run a job of that platform: it has torch and such a device."""
    return is_here(platform) and find_spec("torch") is not None


def _standing(op: str, machine: _Machine) -> VariantStatus:
    best = variant(op, machine.platform)
    otherwise = REFERENCE if machine.is_here else ""
    if best == REFERENCE:
        return VariantStatus(op, machine.platform, best, otherwise, reason(op, machine.platform))
    if machine.is_here and machine.runs(op):
        speeds = machine.speeds_of(op)
        why = "; ".join(words for speed in speeds if (words := speed.verdict))
        return VariantStatus(op, machine.platform, best, best, why, speeds=speeds)
    return VariantStatus(op, machine.platform, best, otherwise, *machine.obstacle(op))


def reason(op: str, platform: str) -> str:
    """The reason for an operator that runs its reference on a platform."""
    return BY_PLATFORM.get((op, platform)) or EVERYWHERE.get(op) or NOT_YET


class _Machine:
    """Look up what this machine has for one platform; each part once, when it is first needed."""

    def __init__(self, platform: str) -> None:
        self.platform = platform
        self.is_here = is_here(platform)
        self.can_run = can_run(platform)

    def runs(self, op: str) -> bool:
        """Return whether the declared variant of an operator runs."""
        if reference_only():
            return False
        kind = variant(op, self.platform)
        return op in self.built if kind == CPP else kind not in _PACKAGES or find_spec(_PACKAGES[kind]) is not None

    def kind(self, op: str) -> str:
        """Return the variant of an operator that runs, and the types in which it leaves its products to torch."""
        best = variant(op, self.platform)
        if best == REFERENCE or not self.runs(op):
            return REFERENCE
        types = " and ".join(speed.label for speed in self.speeds_of(op) if speed.leaves_to_library)
        return f"{best}, torch's products in {types}" if types else best

    def speeds_of(self, op: str) -> tuple[Speed, ...]:
        """Return the times of an operator on this processor."""
        return tuple(speed for speed in self.speeds if speed.op == op)

    def obstacle(self, op: str) -> tuple[str, str]:
        """Return the reason why it does not, and the command that mends it, if there is one."""
        if not self.is_here:
            return f"this machine has no {_WORDS[self.platform]}", ""
        if reference_only():
            return "MINDSPEED_OPS is reference", ""
        kind = variant(op, self.platform)
        if kind == CPP and (lacking := missing(op)):
            return f"this processor has no {lacking}", ""
        return self.no_library if kind == CPP else (f"{_PACKAGES[kind]} is not installed", "")

    @cached_property
    def built(self) -> frozenset[str]:
        """Operators in the library that a process would load here."""
        return frozenset(self._library.operators) if self._library is not None else frozenset()

    @cached_property
    def speeds(self) -> tuple[Speed, ...]:
        """Times of these operators on this processor."""
        if self.platform != "cpu" or reference_only() or self._library is None:
            return ()
        return speeds.read(self._library.library)

    @cached_property
    def _library(self) -> Built | None:
        return build_cache.find(self._key) if self._key is not None else None

    @cached_property
    def no_library(self) -> tuple[str, str]:
        """Return the reason why there is no library for this machine, and the command that builds it, if it can."""
        if self._key is None:
            return "torch is not installed", ""
        if (problem := build_cache.not_trusted(self._key)) is not None:
            return problem.message, problem.fix_text
        other = build_cache.nearest(self._key)
        what = build_cache.why_not(self._key, other) if other is not None else "not built"
        if find_compiler(os.environ.get("CXX")) is None:
            return f"{what}, and no C++ compiler is available", ""
        if obstacle := build_obstacle(self.platform):
            return f"{what}, and {obstacle}", ""
        return what, "mindspeed ops build"

    @cached_property
    def _key(self) -> build_cache.Key | None:
        torch = build_cache.torch_version()
        return build_cache.wanted(torch) if torch is not None else None
