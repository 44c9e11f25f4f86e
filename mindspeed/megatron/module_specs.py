"""Exchange modules in the specs of Megatron without changing the given specs, which scripts share and reuse."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any


def class_for(part: type, exchange: Mapping[type, Any]) -> Any:
    """Return what ``exchange`` has for a class, or for the one that it ``stands_for``; the class itself where it has nothing.

    A class for another one that is a subclass of it becomes both: it keeps the name, the parameters and the checkpoints of
    ``part``.
    """
    if part in exchange:
        return exchange[part]
    role: Any = getattr(part, "stands_for", None)
    new: Any = exchange.get(role)
    if isinstance(new, type) and issubclass(new, role):
        return _both(new, part)
    if hasattr(new, "module") and isinstance(new.module, type) and issubclass(new.module, role):
        return dataclasses.replace(new, module=_both(new.module, part))
    return part if new is None else new


@lru_cache(maxsize=64)
def _both(new: type, part: type) -> type:
    """Return the class ``part`` with what a feature's class ``new`` changes of their common base."""
    return type(part.__name__, (new, part), {"__module__": part.__module__, "__qualname__": part.__qualname__})


def with_modules(spec: Any, exchange: Mapping[type, Any]) -> Any:
    """Copy a spec with every module class that is a key of ``exchange`` replaced by the value: a class, or a ModuleSpec.

    The parameters of a ModuleSpec reach the module beside those that the given spec has for it.
    """

    def exchanged(name: str, part: Any) -> Any:
        if isinstance(part, type):
            return class_for(part, exchange)
        module = getattr(part, "module", None)
        new = class_for(module, exchange) if isinstance(module, type) else None
        if new is None or isinstance(new, type):
            return part
        return dataclasses.replace(part, module=new.module, params={**part.params, **new.params})

    return with_parts(spec, exchanged)


def with_parts(spec: Any, exchange: Callable[[str, Any], Any]) -> Any:
    """Copy a spec with every part replaced by ``exchange(name, part)``; ``name`` is the field that has it, or empty.

    Goes through ModuleSpec, partials, submodule dataclasses, lists and tuples, not into what was exchanged. Parts in which
    nothing is exchanged are not copied, and one part that occurs in several places (a layer spec in a list) stays one.
    """
    done: dict[tuple[str, int], Any] = {}

    def copied(name: str, part: Any) -> Any:
        if (name, id(part)) not in done:
            new = exchange(name, part)
            done[name, id(part)] = new if new is not part else inside(part)
        return done[name, id(part)]

    def inside(part: Any) -> Any:
        if isinstance(part, list | tuple):
            items = [copied("", item) for item in part]
            return type(part)(items) if any(new is not old for new, old in zip(items, part, strict=True)) else part
        if isinstance(part, partial):
            values = {"": part.func, **part.keywords}
            new = {name: copied(name, value) for name, value in values.items()}
            changed = any(new[name] is not value for name, value in values.items())
            return partial(new.pop(""), *part.args, **new) if changed else part
        if not dataclasses.is_dataclass(part) or isinstance(part, type):
            return part
        values = {field.name: getattr(part, field.name) for field in dataclasses.fields(part) if field.init}
        fields = {name: copied(name, value) for name, value in values.items()}
        fields = {name: value for name, value in fields.items() if value is not values[name]}
        return dataclasses.replace(part, **fields) if fields else part

    return copied("", spec)


def is_unpatched(function: Any, owner: type) -> bool:
    """Return whether a function is written in the module of a class; one that wraps another takes over its names only."""
    written_in = getattr(getattr(function, "__code__", None), "co_filename", None)
    return written_in == sys.modules[owner.__module__].__file__
