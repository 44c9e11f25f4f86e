"""Find holders of an original after patching, through the garbage collector."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterable, Iterator, Sequence
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, Final

from mindspeed.engine.inspection.sites import inside_tree
from mindspeed.engine.patching.journal import HEAP_TYPE
from mindspeed.engine.patching.site_patch import PatchedSite
from mindspeed.problems import Fix, Problem

_NO_HOLDERS: Final = (dict, list, tuple, set, frozenset, CellType)
"""Containers are reached through what owns them; most of the heap is made of these."""
_NO_HOLDING_MODULES: Final = (PatchedSite.__module__, "unittest.mock")
"""Modules whose instances are no holders. The parts of an original that is a mock refer to it: Megatron makes mocks where
Transformer Engine is missing."""


def stale_holders(bound: Sequence[PatchedSite], written: Iterable[Any] = ()) -> list[Problem]:
    """MS404 for every closure, partial, bound method and instance that holds an original which has been replaced.

    The patched objects hold theirs, as do those that patching has ``written`` and a later layer has replaced, and modules that
    define a replacement may. A class's own ``__class__`` cells, mro, annotations and weak references, frames, and the records
    of this package are no holders, nor are the operator tables of torch, of functions that the base plan patches in torch
    itself. Walks the whole heap.
    """
    originals = {id(one.original): one for one in bound if one.exchanges()}
    inner = {id(one.original) for one in bound if not one.group.own and not inside_tree(one.group.module)}
    allowed = _reachable([*(one.current for one in bound), *written])
    found: dict[tuple[str, str], PatchedSite] = {}
    for holder, held in _holders(frozenset(originals)) if originals else ():
        if id(holder) in allowed or (type(holder) is FunctionType and id(holder.__closure__) in allowed):
            continue  # also a patched function as it was before its calls were counted
        for target in held:
            one = originals.get(id(target))
            if one is None or (id(one.original) in inner and _package(holder) == one.group.module.partition(".")[0]):
                continue
            if getattr(holder, "__module__", None) not in one.keeping:
                found[_described(holder), one.group.site] = one
    problems = []
    for (holder, site), one in sorted(found.items(), key=lambda item: item[0]):
        text = f"{holder} still refers to the unpatched {site}, so it runs without the patch of {one.group.owner}"
        problems.append(
            Problem(
                "MS404",
                text,
                (one.group.owner,),
                fix=Fix.advise("import mindspeed.megatron_adaptor, or call mindspeed.activate, before this object is created"),
            )
        )
    return problems


def _holders(ids: frozenset[int]) -> Iterator[tuple[Any, list[Any]]]:
    """Yield every closure, partial, bound method and instance that holds an object with one of these ids, and what it holds."""
    objects = gc.get_objects()
    kinds = {kind for kind in set(map(type, objects)) if _holds_something(kind)}
    for holder in [one for one in objects if type(one) in kinds]:
        kind = type(holder)
        if kind is FunctionType:
            held = _closed_over(holder) if holder.__closure__ else []
        elif kind is functools.partial:
            held = [holder.func, *holder.args, *holder.keywords.values()]
        elif kind is MethodType:
            held = [holder.__func__]
        else:
            held = [kind, *_fields(holder)]
        if not ids.isdisjoint(map(id, held)):
            yield holder, held


def _holds_something(kind: type) -> bool:
    """Return whether objects of a type may be holders."""
    if kind in (FunctionType, functools.partial, MethodType):
        return True
    own = kind in _NO_HOLDERS or kind.__module__ in _NO_HOLDING_MODULES
    return not own and bool(kind.__flags__ & HEAP_TYPE) and not issubclass(kind, type | ModuleType)


def _described(holder: Any) -> str:
    """A holder in words."""
    if isinstance(holder, FunctionType):
        return f"the closure of {holder.__module__}.{holder.__qualname__}"
    if isinstance(holder, MethodType):
        return f"a bound method of {_name(type(holder.__self__))}"
    return "a partial" if type(holder) is functools.partial else f"an instance of {_name(type(holder))}"


def _reachable(patched: Iterable[Any]) -> set[int]:
    """Ids of what wrappers are made of: their closures with their cells, partials and bound methods, at any depth."""
    seen: set[int] = set()
    todo = list(patched)
    while todo:
        part = todo.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, FunctionType):
            seen.add(id(part.__closure__))
            todo += _closed_over(part)
        elif isinstance(part, functools.partial | MethodType | staticmethod | classmethod):
            todo += gc.get_referents(part)
        elif callable(part) and not isinstance(part, type):
            todo += _fields(part)
    return seen


def _closed_over(function: FunctionType) -> list[Any]:
    """Contents of the cells of a function, without ``__class__`` and empty ones."""
    contents = []
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if name != "__class__":
            try:
                contents.append(cell.cell_contents)
            except ValueError:
                continue
    return contents


def _fields(instance: Any) -> list[Any]:
    """Values of an instance's dictionary, read without its ``__getattr__``."""
    try:
        return list(object.__getattribute__(instance, "__dict__").values())
    except AttributeError:
        return []


def _package(holder: Any) -> str:
    """Top-level package of a function, or of an instance's class."""
    module = holder.__module__ if isinstance(holder, FunctionType) else type(holder).__module__
    return (module or "").partition(".")[0]


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
