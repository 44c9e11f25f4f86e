"""Snapshot of a nested value, so that a change to it is seen. Only attributes that exist are read, no method is called."""

from __future__ import annotations

from dataclasses import is_dataclass
from typing import Any

_PLAIN = (str, bytes, int, float, complex, type(None))


class _Leaf:
    """An object that is compared by identity, and kept alive until then."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Leaf) and other.value is self.value

    __hash__ = None  # type: ignore[assignment]


def snapshot(value: object) -> object:
    """Return an object that equals the later snapshot of ``value`` while nothing in it has changed.

    Dataclasses, lists, tuples and dictionaries are copied down to their leaves. Plain values are compared by type and
    value, every other object by identity.
    """
    return _copy(value, {})


def _copy(value: object, seen: dict[int, int]) -> object:
    if isinstance(value, _PLAIN):
        return (type(value), value)
    if not isinstance(value, list | tuple | dict) and (isinstance(value, type) or not is_dataclass(value)):
        return _Leaf(value)
    if id(value) in seen:  # shared, or a cycle
        return ("seen", seen[id(value)])
    seen[id(value)] = len(seen)
    if isinstance(value, list | tuple):
        return (type(value), [_copy(item, seen) for item in value])
    items: dict[Any, Any] = value if isinstance(value, dict) else _attributes(value)
    return (type(value), [(_copy(key, seen), _copy(item, seen)) for key, item in items.items()])


def _attributes(value: object) -> dict[str, object]:
    """Return the attributes that a dataclass instance has by now; a field may be missing while it is initialised."""
    slots = (name for base in type(value).__mro__ for name in vars(base).get("__slots__", ()))
    return {**getattr(value, "__dict__", {}), **{name: getattr(value, name) for name in slots if hasattr(value, name)}}
