"""Exchanging modules in Megatron's specs without changing the specs that were given, which scripts share and reuse."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


def with_modules(spec: Any, exchange: Mapping[type, Any], done: dict[int, Any] | None = None) -> Any:
    """A copy of a spec in which every module class that is a key of ``exchange`` is the value instead.

    Goes through ModuleSpec, submodule dataclasses, lists and tuples. Parts without such a module are not copied, and
    one part that occurs in several places (a layer spec in a list) stays one.
    """
    done = {} if done is None else done
    if isinstance(spec, type):
        return exchange.get(spec, spec)
    if id(spec) in done:
        return done[id(spec)]
    changed = spec
    if isinstance(spec, list | tuple):
        items = [with_modules(item, exchange, done) for item in spec]
        if any(new is not old for new, old in zip(items, spec, strict=True)):
            changed = type(spec)(items)
    elif dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        values = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec) if field.init}
        fields = {name: with_modules(value, exchange, done) for name, value in values.items()}
        fields = {name: value for name, value in fields.items() if value is not values[name]}
        if fields:
            changed = dataclasses.replace(spec, **fields)
    done[id(spec)] = changed
    return changed
