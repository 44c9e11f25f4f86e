"""Finding every holder of an object and giving it another one, with a journal that puts each back exactly.

Holders are the entries of module dictionaries, class dictionaries and containers, fields of dataclass instances such as
Megatron's ``ModuleSpec``, defaults of functions, and the ``__bases__`` of subclasses. Dictionaries are read directly,
so that no lazy ``__getattr__`` fires. Replaced values keep their key's place, so the order of a dictionary never changes.
"""

from __future__ import annotations

import gc
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from operator import is_ as _is
from types import FunctionType, MappingProxyType, ModuleType
from typing import Any, Final, NamedTuple
from weakref import WeakSet

from mindspeed.activation import references
from mindspeed.activation.sites import TREE, inside_tree
from mindspeed.plugins.problems import PatchError, Problem

ABSENT: Final = type("ABSENT", (), {"__slots__": (), "__repr__": lambda self: "ABSENT"})()
"""What a place holds before something was planted there."""


HEAP_TYPE: Final = 1 << 9
"""``__flags__`` bit of a class whose attributes can be set; compiled classes lack it."""


class Place(NamedTuple):
    """How one kind of holder is read and written."""

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


ITEM: Final = Place(lambda holder, key: holder.get(key, ABSENT), _write_item)
ELEMENT: Final = Place(lambda holder, i: holder[i] if i < len(holder) else ABSENT, list.__setitem__)
ATTRIBUTE: Final = Place(lambda holder, name: vars(holder).get(name, ABSENT), _write_attribute)
SLOT: Final = Place(getattr, setattr)
KEY: Final = Place(lambda holder, key: next((k for k in holder if k is key), ABSENT), _rename_key)
MEMBER: Final = Place(lambda holder, key: next((k for k in holder if k is key), ABSENT), _rename_member)


class Change(NamedTuple):
    """One value that was exchanged. Keys and set members are their own value: there ``key`` is what stands there now."""

    place: Place
    holder: Any
    key: Any
    old: Any
    new: Any

    def revert(self) -> None:
        """Put the old value back, unless somebody has changed the place since."""
        if self.place.read(self.holder, self.key) is self.new:
            self.place.write(self.holder, self.key, self.old)


class Journal:
    """Every change in order; undone last first."""

    def __init__(self) -> None:
        self.changes: list[Change] = []

    def write(self, place: Place, holder: Any, key: Any, old: Any, new: Any) -> None:
        """Change a place and remember how to change it back."""
        place.write(holder, key, new)
        self.changes.append(Change(place, holder, new if place in (KEY, MEMBER) else key, old, new))

    def undo(self, mark: int = 0) -> None:
        """Revert everything that was written after the journal had ``mark`` changes.

        Raises PatchError MS404, after reverting all else, for classes whose bases cannot go back.
        """
        problems = []
        while len(self.changes) > mark:
            change = self.changes.pop()
            try:
                change.revert()
            except TypeError as error:  # of bases: subclasses were made meanwhile whose order of bases would break
                problems.append(Problem("MS404", f"{change.holder!r} cannot get its original base class back: {error}"))
        if problems:
            raise PatchError(problems)


class Exchange(NamedTuple):
    """An object to be exchanged for another one.

    The modules ``keeping`` the old one are those that define the new one; ``layers`` are classes whose ancestors keep
    it as base, as does every class that was made by patching.
    """

    old: Any
    new: Any
    keeping: frozenset[str] = frozenset()
    layers: tuple[type, ...] = ()


MADE: Final[WeakSet[type]] = WeakSet()
"""Classes made by patching; those of an earlier plan may live on in models."""

_OWN: Final = __name__.rpartition(".")[0]


def module_dictionaries(names: Iterable[str] | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """``(name, dictionary)`` of the imported modules, or of those named; this package's own records are left out."""
    modules = sys.modules.copy()
    for name, module in modules.items() if names is None else [(name, modules.get(name)) for name in names]:
        if isinstance(module, ModuleType) and not name.startswith(_OWN):
            yield name, ModuleType.__getattribute__(module, "__dict__")


def defined_in(packages: Collection[str]) -> frozenset[int]:
    """Ids of the loaded modules of some top-level packages; of Megatron's also of the functions and classes they define.

    Asks for ``type(value)``, as `isinstance` reads ``__class__``, at which deprecated objects warn.
    """
    found = []
    for name, entries in module_dictionaries([name for name in sys.modules if name.partition(".")[0] in packages]):
        found.append(id(sys.modules[name]))
        if inside_tree(name):
            found += [
                id(value)
                for value in entries.values()
                if issubclass(type(value), FunctionType | type) and value.__module__ == name
            ]
    return frozenset(found)


class Rebinder:
    """Exchanges objects of some top-level packages wherever modules hold them.

    ``counts`` says in how many places each was found, by the id of the old object. ``held`` tells of some how many there
    are to find: modules far from the packages are not searched when all that is exchanged has been found as often.
    """

    def __init__(
        self,
        exchanges: Collection[Exchange],
        packages: Collection[str],
        journal: Journal,
        held: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        self.journal = journal
        self.packages = packages
        self.counts: dict[int, int] = dict.fromkeys((id(exchange.old) for exchange in exchanges), 0)
        self._missing = {key: held.get(key, -1) for key in self.counts}
        self._exchanges = {id(exchange.old): exchange for exchange in exchanges}
        self._kept: dict[str, set[int]] = {}
        for key, exchange in self._exchanges.items():
            for module in exchange.keeping:
                self._kept.setdefault(module, set()).add(key)
        self._module = ""
        self._seen: set[int] = set()
        self._todo: list[Any] = []
        self._new: dict[int, Any] = {}
        self._ids: frozenset[int] = frozenset()

    def rebind(self, modules: Iterable[str] | None = None) -> None:
        """Search the modules named, or all.

        Of all modules, only those with something of the packages among their globals are looked into: they can hold its
        objects in their containers, classes and defaults. The main program always is; of the modules of a patched package
        beside Megatron, such as torch, only those that name an exchanged object.
        """
        self._reparent()
        if modules is not None:
            self._search(modules)
            return
        near = self._near()
        for name, entries in module_dictionaries(near):
            self._enter(name)
            self._exchange(ITEM, entries, entries)
        self._leave_aside_names()
        for search in (self._search_namesakes, self._search, self._leave_aside_annotations, self._search_far):
            if any(self._missing.values()):
                search(near)

    def _near(self) -> list[str]:
        """The modules of Megatron and of the packages that patch it, and the main program."""
        patching = {module.partition(".")[0] for exchange in self._exchanges.values() for module in exchange.keeping}
        packages = {TREE, *patching, "__main__"}
        below = tuple(f"{package}." for package in packages)
        return [name for name in sys.modules.copy() if name.startswith(below) or name in packages]

    def _leave_aside_names(self) -> None:
        """Take for found what is meant to stay: the names of originals in the modules of their replacements."""
        for name, entries in module_dictionaries(self._kept):
            for key in map(id, entries.values()):
                if key in self._kept[name]:
                    self._missing[key] -= 1

    def _leave_aside_annotations(self, near: Iterable[str]) -> None:
        """Take for found what annotations hold, which nobody calls."""
        classes = {key for key, count in self._missing.items() if count > 0 and isinstance(self._exchanges[key].old, type)}
        for key, count in references.in_annotations(classes, module_dictionaries(near)).items():
            self._missing[key] -= count

    def _search_namesakes(self, near: Iterable[str]) -> None:
        """Search the modules that have something missing under its own name."""
        missing = [self._exchanges[key].old for key, count in self._missing.items() if count]
        named = [(old.__name__, old) for old in missing if isinstance(old, FunctionType)]
        self._search([name for name, entries in module_dictionaries() for own, old in named if entries.get(own) is old])

    def _search_far(self, near: Collection[str]) -> None:
        """Search all other modules that may hold an exchanged object."""
        telling = self.counts.keys() | defined_in(self.packages)
        own = {package for package in self.packages if not inside_tree(package)}
        self._search(
            name
            for name, entries in module_dictionaries(set(sys.modules).difference(near))
            if not (self.counts.keys() if name.partition(".")[0] in own else telling).isdisjoint(map(id, entries.values()))
        )

    def _search(self, modules: Iterable[str]) -> None:
        """Search modules and all that they hold; those that keep an original last, so that they keep only what is theirs."""
        for name, entries in sorted(module_dictionaries(modules), key=lambda found: found[0] in self._kept):
            self._enter(name)
            self._look(ITEM, entries, entries)
            while self._todo:
                holder = self._todo.pop()
                _visitors[type(holder)](self, holder)

    def _enter(self, module: str) -> None:
        """Select what may be exchanged in a module."""
        self._module = module
        kept = self._kept.get(module, ())
        if len(self._new) != len(self._exchanges) - len(kept) or kept:
            self._new = {key: exchange.new for key, exchange in self._exchanges.items() if key not in kept}
            self._ids = frozenset(self._new)

    def _write(self, place: Place, holder: Any, key: Any, old: Any) -> None:
        self.journal.write(place, holder, key, old, self._new[id(old)])
        self.counts[id(old)] += 1
        self._missing[id(old)] -= 1

    def _reparent(self) -> None:
        """Give the subclasses of an exchanged class the new one as base."""
        for old, new, _, layers in self._exchanges.values():
            if isinstance(old, type) and isinstance(new, type):
                kept = {ancestor for layer in (new, *layers) for ancestor in layer.__mro__}
                subclasses: list[type] = type.__subclasses__(old)
                for subclass in subclasses:
                    if subclass not in kept and subclass not in MADE:
                        self._change_base(subclass, old, new)

    def _change_base(self, subclass: type, old: type, new: type) -> None:
        bases = tuple(new if base is old else base for base in subclass.__bases__)
        try:
            try:
                self.journal.write(SLOT, subclass, "__bases__", subclass.__bases__, bases)
            except TypeError:
                gc.collect()  # dead classes of an earlier plan, whose order of bases would break, are still its subclasses
                self.journal.write(SLOT, subclass, "__bases__", subclass.__bases__, bases)
        except TypeError as error:
            text = f"{subclass.__module__}.{subclass.__qualname__} cannot follow its patched base class: {error}"
            raise PatchError([Problem("MS404", text)]) from error
        self.counts[id(old)] += 1

    def _exchange(self, place: Place, holder: Any, entries: Mapping[Any, Any]) -> None:
        """Exchange the values of a mapping."""
        if not self._ids.isdisjoint(map(id, entries.values())):
            for key, value in list(entries.items()):
                if id(value) in self._new:
                    self._write(place, holder, key, value)

    def _look(self, place: Place, holder: Any, entries: Mapping[Any, Any]) -> None:
        """Exchange the values of a mapping, renew immutable ones that contain something exchanged, queue other holders."""
        self._exchange(place, holder, entries)
        if any(map(_visitors.__getitem__, set(map(type, entries.values())))):
            for key, value in list(entries.items()):
                kind = type(value)
                if kind is FunctionType:
                    if value.__defaults__ or value.__kwdefaults__:
                        self._visit_function(value)
                elif _visitors[kind] is not None:
                    renewed = self._renewed(value)
                    if renewed is not value:
                        self.journal.write(place, holder, key, value, renewed)

    def _renewed(self, value: Any) -> Any:
        """The value that stands for ``value``: itself unless it is immutable and contains something exchanged."""
        kind = type(value)
        if id(value) in self._new:
            self.counts[id(value)] += 1
            return self._new[id(value)]
        if kind is tuple or kind is frozenset:
            parts = [self._renewed(part) for part in value]
            return value if all(map(_is, parts, value)) else kind(parts)
        if kind is staticmethod or kind is classmethod:
            function = self._renewed(value.__func__)
            return value if function is value.__func__ else kind(function)
        if kind is FunctionType:
            self._visit_function(value)
        elif (visit := _visitors[kind]) is None or id(value) in self._seen:
            return value
        elif visit is not Rebinder._visit_class or value.__module__ == self._module:  # a class belongs to its own module
            self._seen.add(id(value))
            self._todo.append(value)
        return value

    def _visit_function(self, function: FunctionType) -> None:
        """Renew defaults, in the function's own module; elsewhere it is only a name."""
        defaults, keywords = function.__defaults__, function.__kwdefaults__
        if function.__module__ == self._module:
            renewed = self._renewed(defaults) if defaults else defaults
            if renewed is not defaults:
                self.journal.write(SLOT, function, "__defaults__", defaults, renewed)
            if keywords:
                self._exchange(ITEM, keywords, keywords)

    def _visit_class(self, cls: type) -> None:
        if cls.__flags__ & HEAP_TYPE:
            self._look(ATTRIBUTE, cls, vars(cls))

    def _visit_dict(self, entries: dict[Any, Any]) -> None:
        self._look(ITEM, entries, entries)
        if type(entries) is dict:
            self._rename(KEY, entries)

    def _visit_list(self, elements: list[Any]) -> None:
        self._look(ELEMENT, elements, dict(enumerate(elements)))

    def _visit_set(self, members: set[Any]) -> None:
        self._rename(MEMBER, members)

    def _visit_instance(self, instance: Any) -> None:
        fields = getattr(instance, "__dict__", None)
        if type(fields) is dict:
            self._look(ITEM, fields, fields)

    def _rename(self, place: Place, holder: Any) -> None:
        if not self._ids.isdisjoint(map(id, holder)):
            for key in [key for key in holder if id(key) in self._new]:
                self._write(place, holder, key, key)


class _Visitors(dict[type, Any]):
    """What to do with a holder of a type; None for a type that holds nothing that is exchanged."""

    def __missing__(self, kind: type) -> Any:
        visitor: Callable[[Rebinder, Any], None] | None = None
        if issubclass(kind, type):
            visitor = Rebinder._visit_class
        elif "__dataclass_fields__" in vars(kind):
            visitor = Rebinder._visit_instance
        self[kind] = visitor
        return visitor


def _renewed_in_place(rebinder: Rebinder, value: Any) -> None:
    """Immutable holders never wait: they are renewed where they are found."""


_visitors: Final = _Visitors(
    {
        dict: Rebinder._visit_dict,
        OrderedDict: Rebinder._visit_dict,
        defaultdict: Rebinder._visit_dict,
        list: Rebinder._visit_list,
        set: Rebinder._visit_set,
        FunctionType: Rebinder._visit_function,
        **dict.fromkeys((tuple, frozenset, staticmethod, classmethod), _renewed_in_place),
    }
)
