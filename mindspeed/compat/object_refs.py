"""Objects that old patches hand over and that no import name leads to: closures, lambdas, partials.

The patch engine names replacements as ``"module:qualname"``; here such an object gets a name that is the same on every rank.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any, Final

_objects: Final[dict[str, Any]] = {}
_providers: Final[dict[str, Callable[[], object]]] = {}


def reference(owner: str, target: str, value: Any, number: int) -> str:
    """``"module:qualname"`` of a value: its real name where it works in every process, else one in this module."""
    module, qualname = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if module and module != "__main__" and re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", qualname):
        named: Any = sys.modules.get(module)
        for part in qualname.split("."):
            named = getattr(named, part, None)
        if named is value:
            return f"{module}:{qualname}"
    name = re.sub(r"\W", "_", f"{owner}__{target}__{number}")
    _objects[name] = value
    return f"{__name__}:{name}"


def provide(owner: str, make: Callable[[], object]) -> None:
    """Say how the objects of an owner come into being, for a process that applies a plan made elsewhere."""
    _providers[re.sub(r"\W", "_", f"{owner}__")] = make


def __getattr__(name: str) -> Any:
    if name not in _objects and not name.startswith("__"):
        for prefix, make in list(_providers.items()):
            if name.startswith(prefix):
                make()
    if name in _objects:
        return _objects[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
