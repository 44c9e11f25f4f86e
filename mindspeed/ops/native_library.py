"""Load the library of C++ operators, if it has been built for this very machine. Nothing is ever built here."""

from __future__ import annotations

import warnings
from typing import Final

import torch

from mindspeed.ops import build_cache, speeds
from mindspeed.ops.build_cache import Built
from mindspeed.ops.variants import native_variants, reference_only
from mindspeed.problems import Fix, Problem, advice

DTYPES: Final = dict(zip(speeds.DTYPES, (torch.bfloat16, torch.float32), strict=True))
"""Types that operators are measured in."""
BUILD: Final = "mindspeed ops build"

_loaded: Built | None = None


class OperatorWarning(UserWarning):
    """Operators run their references although something faster was built once."""


def loaded() -> Built | None:
    """The library that this process runs, if any."""
    return _loaded


def load() -> Built | None:
    """Register the C++ operators of this machine's library with PyTorch; a second call does nothing.

    Without a library the references run. One that is broken, or that was built for something else than what is here, is a
    warning (MS512, MS513), and so is one that others could have written (MS518). ``MINDSPEED_OPS=reference`` loads nothing.
    """
    global _loaded
    if _loaded is None and not reference_only() and native_variants("cpu"):
        _loaded = _load()
    return _loaded


def _load() -> Built | None:
    key = build_cache.wanted(str(torch.__version__))
    built = build_cache.find(key)
    if built is None:
        if (problem := build_cache.not_trusted(key)) is not None:
            _warn(problem)
        elif (other := build_cache.nearest(key)) is not None:
            text = f"{build_cache.why_not(key, other)}, so operators use their plain-torch references"
            _warn(Problem("MS513", text, where=str(other.library), fix=advice(BUILD)))
        return None
    try:
        torch.ops.load_library(str(built.library))  # type: ignore[no-untyped-call]
    except (OSError, RuntimeError) as error:
        text = f"the C++ operators cannot be loaded, so operators use their plain-torch references: {error}"
        _warn(Problem("MS512", text, where=str(built.library), fix=Fix.advise(f"{BUILD} --force")))
        return None
    for speed in speeds.read(built.library):
        if speed.leaves_to_library:
            choose_library(speed.op, speed.dtype, speed.small, True)
    return built


def choose_library(op: str, dtype: str, small: bool, chosen: bool) -> None:
    """Leave small or large products of an operator in a type to torch, or to our kernel again. The operators must be loaded."""
    torch.ops.mindspeed_kernels.choose_library(op, DTYPES[dtype], small, chosen)


def _warn(problem: Problem) -> None:
    warnings.warn(str(problem), OperatorWarning, stacklevel=2)
