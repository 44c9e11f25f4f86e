"""Everything that patches may touch in some packages, and where two looks at it differ."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

_VOLATILE = ("__warningregistry__", "__annotations__", "__annotations_cache__")
_SCALARS = (int, float, str, bytes, bool, type(None))


class Snapshot:
    """State of the modules and classes of some packages, of their functions and of the containers in them.

    ``sys.meta_path`` belongs to it. Holds on to every object, so that identities stay comparable.
    """

    def __init__(self, *packages: str) -> None:
        self.finders = (sys.meta_path, list(sys.meta_path))
        self.places: dict[str, list[tuple[Any, Any]]] = {}
        self._seen: dict[int, Any] = {}
        for name, module in sorted(sys.modules.items()):
            if name.partition(".")[0] in packages and isinstance(module, ModuleType):
                self._add(name, vars(module).items())

    def _add(self, place: str, entries: Any) -> None:
        self.places[place] = kept = [(key, value) for key, value in list(entries) if key not in _VOLATILE]
        for key, value in kept:
            if id(value) not in self._seen and not isinstance(value, (ModuleType, *_SCALARS)):
                self._seen[id(value)] = value
                for part, inner in _parts(value):
                    self._add(f"{place} > {key!s:.60}{part}", inner)

    def differences(self, later: Snapshot) -> list[str]:
        """Places that changed, apart from submodules that were first imported meanwhile."""
        found = []
        if self.finders[0] is not later.finders[0] or not _same(self.finders[1], later.finders[1]):
            found.append("sys.meta_path")
        for place, entries in self.places.items():
            after = later.places.get(place)
            if after is None:
                found.append(f"{place} is gone")
                continue
            keys = {key for key, _ in entries if isinstance(key, str)}
            after = [(k, v) for k, v in after if not isinstance(v, ModuleType) or k in keys]
            if not _same([part for entry in entries for part in entry], [part for entry in after for part in entry]):
                changed = [k for k, v in after if not any(k is key or (k == key and v is value) for key, value in entries)]
                found.append(f"{place}: {changed or 'values, keys or their order'}")
        return found


def _same(before: list[Any], after: list[Any]) -> bool:
    def equal(a: Any, b: Any) -> bool:
        return a is b or (type(a) is type(b) and isinstance(a, _SCALARS) and a == b)

    return len(before) == len(after) and all(map(equal, before, after))


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Inner places of an object: what it holds, as ``(key, value)`` pairs."""
    if isinstance(value, type):
        yield " class", vars(value).items()
        yield " bases", enumerate(value.__bases__)
    elif isinstance(value, FunctionType):
        yield " function", [("code", value.__code__), ("name", value.__qualname__), ("module", value.__module__)]
        yield " defaults", [("tuple", value.__defaults__), *(value.__kwdefaults__ or {}).items()]
        yield " attributes", vars(value).items()
    elif isinstance(value, staticmethod | classmethod):
        yield " descriptor", [("function", value.__func__)]
    elif isinstance(value, dict):
        yield " dict", [pair for index, (key, inner) in enumerate(value.items()) for pair in ((index, key), (index, inner))]
    elif isinstance(value, list | tuple):
        yield " sequence", enumerate(value)
    elif isinstance(value, set | frozenset):
        yield " set", enumerate(sorted(value, key=id))
    elif hasattr(type(value), "__dataclass_fields__"):
        yield " fields", vars(value).items() if hasattr(value, "__dict__") else ()
