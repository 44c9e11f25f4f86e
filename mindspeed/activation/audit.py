"""Who still holds an original after patching, asked of the garbage collector."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterable, Sequence
from types import CellType, FunctionType, MethodType
from typing import Any, Final

from mindspeed.activation.binding import Bound
from mindspeed.plugins.problems import Problem

_NO_INSTANCES: Final = (type, FunctionType, dict, list, tuple, set, frozenset, staticmethod, classmethod, Bound)


def stale_holders(bound: Sequence[Bound]) -> list[Problem]:
    """MS404 for every closure, partial, bound method and instance that holds an original which has been replaced.

    The patched objects hold theirs, and modules that define a replacement may. A class's own ``__class__`` cells, mro,
    annotations and weak references, frames, and the records of this package are no holders. Walks the whole heap.
    """
    originals = {id(one.original): one for one in bound if one.exchanges()}
    if not originals:
        return []
    allowed = _reachable(one.current for one in bound)
    texts: dict[str, Bound] = {}
    for holder in gc.get_referrers(*(one.original for one in originals.values())):
        if id(holder) not in allowed and not type(holder).__module__.startswith("mindspeed.activation"):
            for one in {id(target): originals.get(id(target)) for target in gc.get_referents(holder)}.values():
                if one is not None:
                    texts |= dict.fromkeys(_descriptions(holder, one), one)
    return [
        Problem(
            "MS404",
            f"{text} still holds the original of {one.group.site}, which {one.group.owner} patches",
            (one.group.owner,),
            fix="activate before it is made",
        )
        for text, one in texts.items()
    ]


def _reachable(patched: Iterable[Any]) -> set[int]:
    """Ids of what wrappers are made of: their closures, partials and bound methods, at any depth."""
    seen: set[int] = set()
    todo = list(patched)
    while todo:
        part = todo.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, FunctionType):
            todo += part.__closure__ or ()
        elif isinstance(part, CellType | functools.partial | MethodType | staticmethod | classmethod):
            todo += gc.get_referents(part)
        elif not isinstance(part, type) and hasattr(part, "__dict__") and callable(part):
            todo += vars(part).values()
    return seen


def _descriptions(holder: Any, one: Bound) -> list[str]:
    """Names of a holder, one per function that closes over it; none for what is not a stale holder."""
    if isinstance(holder, CellType):
        return [
            f"the closure of {function.__module__}.{function.__qualname__}"
            for function in _closing_over(holder)
            if function.__module__ not in one.keeping
        ]
    if isinstance(holder, functools.partial):
        return [f"the partial {holder!r}"]
    if isinstance(holder, MethodType):
        return [f"the bound method {holder.__qualname__}"]
    if type(holder) is one.original:
        return [f"an instance of {_name(type(holder))}"]
    if type(holder) is dict:
        owners = gc.get_referrers(holder)
        return [f"an instance of {_name(type(owner))}" for owner in owners if _is_instance_with(owner, holder)]
    return [f"an instance of {_name(type(holder))}"] if _is_instance_with(holder, None) else []


def _closing_over(cell: CellType) -> list[FunctionType]:
    """Functions with this cell under a name other than ``__class__``."""
    return [
        function
        for closure in gc.get_referrers(cell)
        if type(closure) is tuple
        for function in gc.get_referrers(closure)
        if isinstance(function, FunctionType) and function.__closure__ is closure
        if function.__code__.co_freevars[closure.index(cell)] != "__class__"
    ]


def _is_instance_with(holder: Any, fields: dict[str, Any] | None) -> bool:
    """Whether ``holder`` is an ordinary instance, and ``fields`` is its dictionary if given."""
    if isinstance(holder, _NO_INSTANCES) or not type(holder).__flags__ & (1 << 9):
        return False
    own = getattr(holder, "__dict__", None)
    return own is not None and (fields is None or own is fields)


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
