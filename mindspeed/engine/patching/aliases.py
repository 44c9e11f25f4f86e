"""Rebind every alias of an object: find each holder and give it another one.

Holders are the entries of module dictionaries, class dictionaries and containers, fields of dataclass instances such as
Megatron's ``ModuleSpec``, functions and arguments of partials, defaults of functions and of dataclass fields, and the
``__bases__`` of subclasses. Dictionaries are read directly, so that no lazy ``__getattr__`` fires.
"""

from __future__ import annotations

import dataclasses
import gc
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import repeat
from operator import is_ as _is
from types import FunctionType, ModuleType
from typing import Any, Final, NamedTuple
from weakref import WeakSet

from mindspeed.engine.inspection.sites import TREE, inside_tree
from mindspeed.engine.patching.journal import ATTRIBUTE, ELEMENT, HEAP_TYPE, ITEM, KEY, MEMBER, PARTIAL, SLOT, Accessor, Journal
from mindspeed.problems import Fix, PatchError, Problem


class Substitution(NamedTuple):
    """An object that a module defines, to be exchanged for another one.

    The modules ``keeping`` the old one are those that define the new one; ``layers`` are classes whose ancestors keep
    it as base, as does every class that was made by patching.
    """

    old: Any
    new: Any
    module: str
    keeping: frozenset[str] = frozenset()
    layers: tuple[type, ...] = ()


MADE: Final[WeakSet[type]] = WeakSet()
"""Classes made by patching; those of an earlier plan may live on in models."""

LIBRARIES: Final = {name: name for name in ("torch", "numpy", "sympy", "networkx", "mpmath")} | dict.fromkeys(
    sys.stdlib_module_names, "Python's own"
)
"""By package the library that it belongs to, of those that import neither Megatron nor any feature.

They have most of the modules of a process.
"""
_COMPILER: Final = "torch._dynamo"
"""The package of torch with tables of its functions."""

_OWN: Final = __name__.rpartition(".")[0]
_dictionary: Final = vars(ModuleType)["__dict__"].__get__
"""The dictionary of a module, whatever its class does when it is asked for one."""


def module_dictionaries(names: Iterable[str] | None = None) -> list[tuple[str, dict[str, Any]]]:
    """``(name, dictionary)`` of the imported modules, or of the named ones, without the records of this package.

    What only claims to be a module by its ``__class__``, as the libraries of cffi do, has no dictionary of one.
    """
    modules = sys.modules.copy()
    named = [(name, modules.get(name)) for name in (modules if names is None else names) if not name.startswith(_OWN)]
    return [(name, _dictionary(module)) for name, module in named if issubclass(type(module), ModuleType)]


def defined_in(packages: Collection[str]) -> frozenset[int]:
    """Ids of the loaded modules of some top-level packages; of Megatron's also of the functions and classes they define.

    Asks for ``type(value)``, as `isinstance` reads ``__class__``, at which deprecated objects warn.
    """
    loaded = {name: module for name, module in sys.modules.copy().items() if name.partition(".")[0] in packages}
    ids = set(map(id, loaded.values()))
    for name, entries in module_dictionaries(filter(inside_tree, loaded)):
        for value in entries.values():
            if issubclass(type(value), (FunctionType, type)) and value.__module__ == name:
                ids.add(id(value))
    return frozenset(ids)


class Rebinder:
    """Exchanges objects of some top-level packages wherever modules hold them.

    ``counts`` says in how many places each was found, by the id of the old object.
    """

    def __init__(self, exchanges: Collection[Substitution], packages: Collection[str], journal: Journal) -> None:
        self.journal = journal
        self.packages = packages
        self.counts: dict[int, int] = dict.fromkeys((id(exchange.old) for exchange in exchanges), 0)
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
        """Search the modules named, or all that may hold an exchanged object."""
        self._reparent()
        self._search(self._modules() if modules is None else module_dictionaries(modules))

    def _modules(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield modules with their dictionaries: those of Megatron and of other packages that patch it, the main program, and
        those with something of the packages among their globals. All can hold its objects in containers, classes, defaults.

        Of a patched library, such as torch, only the modules that name an exchanged object of the library, and those of torch's
        compiler, which has tables of torch's functions.
        """
        patching = {module.partition(".")[0] for exchange in self._exchanges.values() for module in exchange.keeping}
        whole = {TREE, "__main__", *patching - {_OWN.partition(".")[0]}}
        exchanged = frozenset(self.counts)
        known = exchanged | defined_in(self.packages)
        of_libraries: dict[str, list[Any]] = {}
        for exchange in self._exchanges.values():
            if (library := LIBRARIES.get(exchange.module.partition(".")[0])) is not None:
                of_libraries.setdefault(library, []).append(exchange.old)
        holds = {library: _search_for(objects) for library, objects in of_libraries.items()}
        for name, entries in module_dictionaries():
            package = name.partition(".")[0]
            library = LIBRARIES.get(package)
            if library is None:
                ids = exchanged if package in self.packages else known
                is_searched = package in whole or not ids.isdisjoint(map(id, entries.values()))
            else:
                is_searched = library in holds and (
                    (package in whole and name.startswith(_COMPILER)) or holds[library](entries)
                )
            if is_searched:
                yield name, entries

    def _search(self, modules: Iterable[tuple[str, dict[str, Any]]]) -> None:
        """Search modules and all that they hold; those that keep an original last, so that they keep only what is theirs."""
        for name, entries in sorted(modules, key=lambda module: module[0] in self._kept):
            self._enter(name)
            self._look(ITEM, entries, entries)
            while self._todo:
                holder = self._todo.pop()
                _visitors[type(holder)](self, holder)

    def _enter(self, module: str) -> None:
        """Select what may be exchanged in a module."""
        self._module = module
        kept = self._kept.get(module, ())
        if kept or not self._new:
            self._new = {key: exchange.new for key, exchange in self._exchanges.items() if key not in kept}
            self._ids = frozenset(self._new)

    def _write(self, place: Accessor, holder: Any, key: Any, old: Any) -> None:
        self.journal.write(place, holder, key, old, self._new[id(old)])
        self.counts[id(old)] += 1

    def _reparent(self) -> None:
        """Give the subclasses of an exchanged class the new one as base."""
        for old, new, _, _, layers in self._exchanges.values():
            if isinstance(old, type) and isinstance(new, type):
                kept = {ancestor for layer in (new, *layers) for ancestor in layer.__mro__}
                subclasses: list[type] = type.__subclasses__(old)
                for subclass in subclasses:
                    if subclass not in kept and subclass not in MADE and not self._leaves(subclass):
                        self._change_base(subclass, old, new)

    def _leaves(self, subclass: type) -> bool:
        """Return whether a class is exchanged for one that has nothing of it, so that its own bases no longer matter."""
        exchange = self._exchanges.get(id(subclass))
        return exchange is not None and not (isinstance(exchange.new, type) and issubclass(exchange.new, subclass))

    def _change_base(self, subclass: type, old: type, new: type) -> None:
        bases = tuple(new if base is old else base for base in subclass.__bases__)
        write = partial(self.journal.write, SLOT, subclass, "__bases__", subclass.__bases__, bases)
        try:
            try:
                write()
            except TypeError:
                gc.collect()  # dead classes of an earlier plan, whose order of bases would break, are still its subclasses
                write()
        except TypeError as error:
            text = (
                f"{subclass.__module__}.{subclass.__qualname__} cannot inherit from the patched version of its base "
                f"class: {error}"
            )
            raise PatchError(
                [
                    Problem(
                        "MS404",
                        text,
                        fix=Fix.advise(
                            "import mindspeed.megatron_adaptor, or call mindspeed.activate, before this class is defined"
                        ),
                    )
                ]
            ) from error
        self.counts[id(old)] += 1

    def _exchange(self, place: Accessor, holder: Any, entries: Mapping[Any, Any]) -> None:
        """Exchange the values of a mapping."""
        if not self._ids.isdisjoint(map(id, entries.values())):
            for key, value in list(entries.items()):
                if id(value) in self._new:
                    self._write(place, holder, key, value)

    def _look(self, place: Accessor, holder: Any, entries: Mapping[Any, Any]) -> None:
        """Exchange the values of a mapping, renew immutable ones that contain something exchanged, queue other holders."""
        self._exchange(place, holder, entries)
        if any(map(_visitors.__getitem__, set(map(type, entries.values())))):
            for key, value in list(entries.items()):
                kind = type(value)
                if kind is FunctionType:
                    if (value.__defaults__ or value.__kwdefaults__) and value.__module__ == self._module:
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
            if all(map(_is, parts, value)):
                return value
            return kind(parts)
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

    def _visit_field(self, field: dataclasses.Field[Any]) -> None:
        """A field of a dataclass, whose default a dataclass that derives from it takes over."""
        if id(field.default) in self._new:
            self._write(SLOT, field, "default", field.default)

    def _visit_partial(self, called: partial[Any]) -> None:
        if id(called.func) in self._new:
            self._write(PARTIAL, called, "func", called.func)
        if (renewed := self._renewed(called.args)) is not called.args:
            self.journal.write(PARTIAL, called, "args", called.args, renewed)
        self._look(ITEM, called.keywords, called.keywords)

    def _visit_instance(self, instance: Any) -> None:
        fields = getattr(instance, "__dict__", None)
        if type(fields) is dict:
            self._look(ITEM, fields, fields)

    def _rename(self, place: Accessor, holder: Any) -> None:
        if not self._ids.isdisjoint(map(id, holder)):
            for key in [key for key in holder if id(key) in self._new]:
                self._write(place, holder, key, key)


def _search_for(objects: Sequence[Any]) -> Callable[[Mapping[str, Any]], bool]:
    """Return a function that finds one of some objects among entries: two of them one by one, which is faster, more by ids."""
    if len(objects) > 2:
        ids = frozenset(map(id, objects))
        return lambda entries: not ids.isdisjoint(map(id, entries.values()))
    return lambda entries: any(any(map(_is, entries.values(), repeat(one))) for one in objects)


class _Visitors(dict[type, Any]):
    """Map the type of a holder to its visitor; None for a type that holds nothing that is exchanged."""

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
        dataclasses.Field: Rebinder._visit_field,
        partial: Rebinder._visit_partial,
        **dict.fromkeys((tuple, frozenset, staticmethod, classmethod), _renewed_in_place),
    }
)
