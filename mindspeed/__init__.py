"""mindspeed: acceleration features for training large models on Megatron, as plugins."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from mindspeed._version import __version__

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

__all__ = ["__version__", "activate", "deactivate", "defaults", "plan", "report", "suspended"]


class _OldNames:
    """Find modules of MindSpeed that nothing else has found, or say what does their work here."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if not name.startswith("mindspeed."):
            return None
        from mindspeed.legacy import imports

        return imports.find_spec(name)


sys.meta_path.append(_OldNames())


def __getattr__(name: str) -> object:
    if name in __all__:
        from mindspeed import registry

        return getattr(registry, name)
    raise AttributeError(f"module 'mindspeed' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
