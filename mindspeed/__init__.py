"""mindspeed: acceleration features for training large models on Megatron, as plugins."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from mindspeed._version import __version__

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

__all__ = ["__version__", "activate", "deactivate", "defaults", "plan", "report", "step", "suspended"]


class _OldNames:
    """Find modules of MindSpeed and former modules of ours with a prefix, or say what does their work here.

    They are found by functions ``find_spec(name)`` in the entry-point group ``mindspeed.old_names``.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if not name.startswith(self._prefix):
            return None
        from mindspeed.plugins.found import allowed_entries

        found = (entry.load()(name) for _, _, entry in allowed_entries("mindspeed.old_names"))
        return next((spec for spec in found if spec is not None), None)


sys.meta_path.append(_OldNames("mindspeed."))  # asked where nothing else finds a module
# asked first: a folder of that name, with a cache of bytecode that an update of a checkout left, is a package for Python
sys.meta_path.insert(0, _OldNames("mindspeed.features_manager"))


def __getattr__(name: str) -> object:
    if name in __all__:
        from mindspeed import registry

        return getattr(registry, name)
    raise AttributeError(f"module 'mindspeed' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
