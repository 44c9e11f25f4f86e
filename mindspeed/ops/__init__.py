"""Operators: each has a ``torch.library`` schema, a plain-torch reference, a shape kernel and a gradient.

``from mindspeed.ops import rms_norm`` gives the function, and imports torch only then.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from mindspeed.ops.npu_rotary_position_embedding import npu_rotary_position_embedding as npu_rotary_position_embedding
    from mindspeed.ops.rms_norm import rms_norm as rms_norm
    from mindspeed.ops.swiglu import swiglu as swiglu

OPERATORS: Final = (
    "npu_rotary_position_embedding",
    "rms_norm",
    "swiglu",
)
"""Public operators; each is a function in the module of the same name."""

__all__ = ["npu_rotary_position_embedding", "rms_norm", "swiglu"]


class _Operators(ModuleType):
    """The import system binds a submodule here under its name, which is also its operator's: the function wins."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in OPERATORS and isinstance(value, ModuleType):
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Operators


def __getattr__(name: str) -> Any:
    if name not in OPERATORS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{name}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *OPERATORS})
