"""Changing one value in one place, with a journal that puts each back exactly.

Replaced values keep their key's place, so the order of a dictionary never changes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

from mindspeed.problems import Fix, PatchError, Problem

ABSENT: Final = type("ABSENT", (), {"__slots__": (), "__repr__": lambda self: "ABSENT"})()
"""The value of a name that did not exist before."""


HEAP_TYPE: Final = 1 << 9
"""``__flags__`` bit of a class whose attributes can be set; compiled classes lack it."""


class Accessor(NamedTuple):
    """Read and write one kind of holder."""

    read: Callable[[Any, Any], Any]
    write: Callable[[Any, Any, Any], None]


def _write_attribute(holder: Any, name: str, value: Any) -> None:
    if value is ABSENT:
        type.__delattr__(holder, name)
    else:
        type.__setattr__(holder, name, value)


def _write_item(holder: dict[Any, Any], name: Any, value: Any) -> None:
    if value is ABSENT:
        del holder[name]
    else:
        holder[name] = value


def _rename_key(holder: dict[Any, Any], old: Any, new: Any) -> None:
    entries = [(new if key is old else key, value) for key, value in holder.items()]
    holder.clear()
    holder.update(entries)


def _rename_member(holder: set[Any], old: Any, new: Any) -> None:
    holder.remove(old)
    holder.add(new)


def _write_partial(holder: partial[Any], name: str, value: Any) -> None:
    parts = {"func": holder.func, "args": holder.args, name: value}
    holder.__setstate__((parts["func"], parts["args"], holder.keywords, vars(holder)))  # type: ignore[attr-defined]


ITEM: Final = Accessor(lambda holder, key: holder.get(key, ABSENT), _write_item)
ELEMENT: Final = Accessor(lambda holder, i: holder[i] if i < len(holder) else ABSENT, list.__setitem__)
ATTRIBUTE: Final = Accessor(lambda holder, name: vars(holder).get(name, ABSENT), _write_attribute)
SLOT: Final = Accessor(getattr, setattr)
PARTIAL: Final = Accessor(getattr, _write_partial)
KEY: Final = Accessor(lambda holder, key: next((k for k in holder if k is key), ABSENT), _rename_key)
MEMBER: Final = Accessor(lambda holder, key: next((k for k in holder if k is key), ABSENT), _rename_member)


class JournalEntry(NamedTuple):
    """Record a value that was exchanged. Keys and set members are their value: there ``key`` is the present one."""

    place: Accessor
    holder: Any
    key: Any
    old: Any
    new: Any


class Journal:
    """Every change in order; undone last first."""

    def __init__(self) -> None:
        self.changes: list[JournalEntry] = []

    def write(self, place: Accessor, holder: Any, key: Any, old: Any, new: Any) -> None:
        """Change a place and remember how to change it back."""
        place.write(holder, key, new)
        self.changes.append(JournalEntry(place, holder, new if place in (KEY, MEMBER) else key, old, new))

    def undo(self, mark: int = 0) -> None:
        """Restore every value that was changed after ``mark`` changes, unless other code has changed it since.

        Raises PatchError MS404, after reverting all else, for classes whose bases cannot go back.
        """
        problems = []
        while len(self.changes) > mark:
            place, holder, key, old, new = self.changes.pop()
            try:
                if place.read(holder, key) is new:
                    place.write(holder, key, old)
            except TypeError as error:  # of bases: subclasses were made meanwhile whose order of bases would break
                text = f"the plan replaced the base class of {holder!r}, and the original one cannot be restored: {error}"
                problems.append(Problem("MS404", text, fix=Fix.advise("start a new process instead of deactivating the plan")))
        if problems:
            raise PatchError(problems)
