"""Megatron's kernel files where there is no Triton to write kernels in."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from functools import partial
from importlib import util
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any, Final

from mindspeed.megatron.fixes.feature import TABLES
from mindspeed.plugins.patches import Function, wrapper
from mindspeed.problems import PlatformError, Problem, advice

UNGUARDED: Final = frozenset(TABLES["unguarded"])
"""Modules that import triton without asking whether it is there; all others ask."""

_TRITON: Final = "triton"


@wrapper
def import_without_triton(find_spec: Function, cls: Any, fullname: str, *args: Any, **kwargs: Any) -> ModuleSpec | None:
    """``PathFinder.find_spec``: where Triton is not installed, a module of `UNGUARDED` runs with a replacement for it.

    The stand-in can be imported by that one module only, so everyone else still learns that there is no Triton.
    """
    spec: ModuleSpec | None = find_spec(cls, fullname, *args, **kwargs)
    if fullname in UNGUARDED and spec is not None and spec.loader is not None and util.find_spec(_TRITON) is None:
        run = spec.loader.exec_module
        spec.loader.exec_module = partial(_run_beside_stand_in, run)  # type: ignore[method-assign]
    return spec


def _run_beside_stand_in(run: Callable[[ModuleType], None], module: ModuleType) -> None:
    triton = _stand_in()

    def import_here(name: str, *rest: Any, **named: Any) -> Any:
        return triton if name.partition(".")[0] == _TRITON else builtins.__import__(name, *rest, **named)

    vars(module)["__builtins__"] = {**vars(builtins), "__import__": import_here}
    run(module)
    vars(module)["__builtins__"] = vars(builtins)


def _stand_in() -> ModuleType:
    """As much of triton as a module needs while it defines its kernels."""
    language = ModuleType(f"{_TRITON}.language")
    language.__getattr__ = _type_of_kernels  # type: ignore[method-assign]
    triton = ModuleType(_TRITON)
    triton.jit = jit  # type: ignore[attr-defined]
    triton.autotune = triton.heuristics = _as_it_is  # type: ignore[attr-defined]
    triton.Config = _config  # type: ignore[attr-defined]
    triton.__version__ = "0.0.0"  # type: ignore[attr-defined]
    triton.language = language  # type: ignore[attr-defined]
    return triton


def _type_of_kernels(name: str) -> type:
    """Return a stand-in for a name of ``triton.language``, such as ``constexpr`` or ``int64`` in an annotation."""
    if name.startswith("__"):
        raise AttributeError(name)
    return object


def _as_it_is(*args: Any, **kwargs: Any) -> Callable[[Any], Any]:
    """``triton.autotune`` and ``triton.heuristics``: the kernel that they decorate."""
    return lambda kernel: kernel


def _config(kwargs: Any, **options: Any) -> SimpleNamespace:
    """``triton.Config``: the sizes and options of a variant of a kernel."""
    return SimpleNamespace(kwargs=kwargs, **options)


class AbsentKernel:
    """A kernel that was defined without Triton: launching it raises PlatformError (MS501)."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.name = f"{function.__module__}.{function.__qualname__}"

    def __getitem__(self, grid: Any) -> Any:
        options = (
            "batch_invariant_kernels: --batch-invariant-mode, paged_stash: --moe-paged-stash, ssm: inference of Mamba models"
        )
        fix = f"pip install triton, or remove the Megatron option that calls the kernels of this module ({options})"
        text = f"{self.name} is a Triton kernel, but Triton is not installed"
        raise PlatformError([Problem("MS501", text, fix=advice(fix))])


def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """``triton.jit``, with and without options."""
    return partial(jit, **options) if function is None else AbsentKernel(function)


@wrapper
def build_nothing(load: Function, args: Any) -> None:
    """``fused_kernels.load``: without a CUDA compiler it fails, and with one it builds nothing."""
