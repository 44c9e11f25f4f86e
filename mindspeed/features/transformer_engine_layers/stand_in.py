"""An importable ``transformer_engine`` where none is installed: a version, and types for isinstance."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

from mindspeed.features.transformer_engine_layers import interface, modules
from mindspeed.features.transformer_engine_layers.interface import VERSION, refuse

ROOT: Final = "transformer_engine"
_MODULES: Final = ("Linear", "LayerNormLinear", "LayerNormMLP", "LayerNorm", "RMSNorm", "GroupedLinear")
_ATTENTION: Final = ("DotProductAttention", "MultiheadAttention")
_FP8: Final = (
    "FP8GlobalStateManager",
    "check_fp8_support",
    "check_fp8_block_scaling_support",
    "check_mxfp8_support",
    "fp8_autocast",
)
_RECOMPUTATION: Final = ("activation_recompute_forward",)
_CONTENT: Final[dict[str, Sequence[str]]] = {
    ROOT: (),
    f"{ROOT}.common": (),
    f"{ROOT}.common.recipe": (),
    f"{ROOT}.pytorch": (*_MODULES, *_ATTENTION, "TransformerLayer"),
    f"{ROOT}.pytorch.attention": _ATTENTION,
    f"{ROOT}.pytorch.distributed": _RECOMPUTATION,
    f"{ROOT}.pytorch.fp8": _FP8,
    f"{ROOT}.pytorch.module": _MODULES,
    f"{ROOT}.pytorch.module.base": ("TransformerEngineBaseModule",),
    f"{ROOT}.pytorch.ops": (),
    f"{ROOT}.pytorch.transformer": ("TransformerLayer",),
}
"""Modules of the stand-in, and the types and functions that each has."""


class EngineStandIn(MetaPathFinder, Loader):
    """Finds and makes the modules. While modules of megatron.core run, they do not see them."""

    def __init__(self) -> None:
        self._hidden = 0

    def install(self) -> None:
        """Let the modules be imported."""
        sys.meta_path.append(self)

    def remove(self) -> None:
        """Forget the modules."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        self._take_out()

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Let no code import the modules in a with-block."""
        taken = self._take_out()
        self._hidden += 1
        try:
            yield
        finally:
            self._hidden -= 1
            if not self._hidden:
                sys.modules.update(taken)

    @contextmanager
    def visible(self) -> Iterator[None]:
        """Let code import the modules in a with-block, also where they are hidden."""
        before, self._hidden = self._hidden, 0
        try:
            yield
        finally:
            self._hidden = before
            if before:
                self._take_out()

    def _take_out(self) -> dict[str, ModuleType]:
        names = [name for name in _CONTENT if getattr(sys.modules.get(name), "__loader__", None) is self]
        return {name: sys.modules.pop(name) for name in names}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the spec of a module of the stand-in."""
        if name not in _CONTENT or self._hidden:
            return None
        return ModuleSpec(name, self, is_package=any(other.startswith(f"{name}.") for other in _CONTENT))

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Make a module, whose further types raise MS338 when they are instantiated."""
        return _Module(spec.name, "Replacement of Transformer Engine, which is not installed, by mindspeed.")

    def exec_module(self, module: ModuleType) -> None:
        """Put the types and the version into a module."""
        module.__loader__ = self
        names = _CONTENT[module.__name__]
        for name in names:
            setattr(module, name, getattr(interface if names in (_FP8, _RECOMPUTATION) else modules, name))
        if module.__name__ == ROOT:
            module.__dict__["__version__"] = VERSION


class _Module(ModuleType):
    """Module in which every capitalized name is a type, and whose submodules need no import of their own."""

    def __getattr__(self, name: str) -> Any:
        if f"{self.__name__}.{name}" in _CONTENT:
            return import_module(f"{self.__name__}.{name}")
        if not name[:1].isupper():
            raise AttributeError(f"mindspeed's replacement of {self.__name__} has no attribute {name}")
        made = type(name, (), {"__module__": self.__name__, "__init__": _refused})
        setattr(self, name, made)
        return made


def _refused(self: Any, *args: Any, **kwargs: Any) -> None:
    """Raise MS338 with the name of a type that is asked for and not provided."""
    name = f"{type(self).__module__}.{type(self).__name__}"
    refuse(
        name, "is not available, because Transformer Engine is not installed", "install Transformer Engine, or remove its use"
    )
