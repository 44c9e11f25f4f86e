"""How many references to an object there are: when a search has met them all, nothing else in the process holds it.

CPython counts references exactly, and a function or class that nobody uses yet has few that are not names. So the places
where it was found can be compared with the count, which is much cheaper than to look into every loaded module.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import FunctionType, GenericAlias, GetSetDescriptorType, MemberDescriptorType, UnionType
from typing import Any, Final

_DESCRIPTORS: Final = (GetSetDescriptorType, MemberDescriptorType)


def elsewhere(value: Any) -> int:
    """References to an object beside the caller's variable and those that it, if a class, and its subclasses have themselves.

    Those of their own are bases, method resolution orders, descriptors of attributes and ``__class__`` cells. The number
    may be too high, as for a class that has instances, but never too low.
    """
    return sys.getrefcount(value) - _OF_A_VARIABLE - (_own(value) if isinstance(value, type) else 0)


def in_annotations(wanted: Collection[int], modules: Iterable[tuple[str, dict[str, Any]]]) -> Counter[int]:
    """How often the annotations in some modules hold the objects with these ids. They hold without using, like a comment.

    From Python 3.14 on annotations hold nothing before somebody reads them.
    """
    found: Counter[int] = Counter()
    if not wanted or sys.version_info >= (3, 14):
        return found
    todo = [held for name, entries in modules for held in _annotations(name, entries)]
    seen: set[int] = set()
    while todo:
        held = todo.pop()
        if id(held) in seen:
            continue
        seen.add(id(held))
        for value in held.values() if isinstance(held, dict) else held:
            if id(value) in wanted:
                found[id(value)] += 1
            elif type(value) in (GenericAlias, UnionType):
                todo.append(value.__args__)
    return found


def _annotations(module: str, entries: Mapping[str, Any]) -> Iterator[dict[str, Any] | tuple[Any, ...]]:
    """The annotations of the functions and classes that a module defines.

    Asks for ``type(entry)``, as `isinstance` reads ``__class__``, at which deprecated objects warn.
    """
    for entry in entries.values():
        if issubclass(type(entry), type) and entry.__module__ == module:
            yield vars(entry).get("__annotations__", ())
            for member in vars(entry).values():
                yield from (function.__annotations__ for function in _functions(member))
        elif type(entry) is FunctionType and entry.__module__ == module:
            yield entry.__annotations__


def _references(value: Any) -> int:
    return sys.getrefcount(value)


def _of_a_variable() -> int:
    made = object()
    return _references(made)


_OF_A_VARIABLE: Final = _of_a_variable()


def _own(cls: type) -> int:
    entries = list(vars(cls).values())
    descriptors = sum(type(entry) in _DESCRIPTORS and entry.__objclass__ is cls for entry in entries)
    closures = (function.__closure__ or () for entry in entries for function in _functions(entry))
    cells = {id(cell) for closure in closures for cell in closure if _content(cell) is cls}
    return 1 + descriptors + len(cells) + sum(_inherited(cls, below) for below in _descendants(cls))


def _inherited(cls: type, below: type) -> int:
    """How often a class holds one that it derives from, at whatever distance."""
    return 1 + (below.__base__ is cls) + sum(base is cls for base in below.__bases__)


def _functions(entry: Any) -> Iterator[FunctionType]:
    """The functions in an entry of a class."""
    inner = (entry.fget, entry.fset, entry.fdel) if type(entry) is property else (getattr(entry, "__func__", entry),)
    return (function for function in inner if type(function) is FunctionType)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing was put in yet
        return None


def _descendants(cls: type) -> Iterator[type]:
    seen: set[int] = set()
    todo: list[type] = [cls]
    while todo:
        direct: list[type] = type.__subclasses__(todo.pop())
        for below in direct:
            if id(below) not in seen:
                seen.add(id(below))
                todo.append(below)
                yield below


def _counts_as_expected() -> bool:
    """Whether this interpreter counts as the functions above assume; one without the GIL does not."""

    class Upper:
        __slots__ = ("__weakref__", "entry")

        def own(self) -> Any:
            return __class__  # type: ignore[name-defined]

    class Lower(Upper):
        pass

    def function() -> None:
        """Held by its variable alone."""

    held = [Lower]
    found = elsewhere(Upper), elsewhere(Lower), elsewhere(function)
    return found == (0, len(held), 0) and getattr(sys, "_is_gil_enabled", lambda: True)()


EXACT: Final = _counts_as_expected()
"""Whether `elsewhere` can be relied on here."""
