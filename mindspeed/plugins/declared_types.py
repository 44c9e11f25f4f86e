"""Types of the fields of a declaration: a feature with a wrong one is refused where it is declared, not where it is read."""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from dataclasses import fields
from functools import lru_cache
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

Test = Callable[[Any], bool]

_WORDS: Final[dict[Any, str]] = {
    str: "a string",
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    type(None): "None",
    Any: "anything",
}
_SEQUENCES: Final[dict[Any, Any]] = {
    tuple: (tuple, list),
    list: (tuple, list),
    Sequence: (tuple, list),
    set: (AbstractSet,),
    frozenset: (AbstractSet,),
    Collection: (AbstractSet, tuple, list),
}
"""Types that stand for a collection: a list may be given for a tuple, a string for neither."""
_COLLECTIONS: Final = {tuple: "tuple", set: "set", frozenset: "set"}


class DeclarationError(TypeError):
    """A field of a declaration has another type than its class declares."""


def require_types(declaration: Any) -> None:
    """Raise DeclarationError for the first field of a dataclass instance whose value does not have the field's type."""
    kind: Any = type(declaration)
    for name, test, words in _tests(kind):
        value = getattr(declaration, name)
        if not test(value):
            raise DeclarationError(f"{kind.__name__}.{name} is {value!r}, not {words}")


@lru_cache(maxsize=64)
def _tests(kind: type[Any]) -> tuple[tuple[str, Test, str], ...]:
    hints = get_type_hints(kind)
    return tuple((field.name, test_of(hints[field.name]), words_of(hints[field.name])) for field in fields(kind))


def test_of(hint: Any) -> Test:
    """Make a test for the values of a type hint."""
    origin, parts = get_origin(hint), get_args(hint)
    if hint is Any:
        return lambda value: True
    if kinds := _plain(hint):
        return lambda value: isinstance(value, kinds)
    if origin in (Union, types.UnionType):
        tests = [test_of(part) for part in parts]
        return lambda value: any(test(value) for test in tests)
    if origin is Literal:
        return lambda value: value in parts
    if origin is Callable:
        return callable
    if origin is Iterable:
        return lambda value: isinstance(value, Iterable) and not isinstance(value, str | bytes)
    if origin is tuple and len(parts) > 1 and parts[-1] is not Ellipsis:
        tests = [test_of(part) for part in parts]
        return lambda value: (
            isinstance(value, (tuple, list))
            and len(value) == len(tests)
            and all(t(v) for t, v in zip(tests, value, strict=True))
        )
    if origin in _SEQUENCES:
        kinds, of_item = _SEQUENCES[origin], test_of(parts[0])
        return lambda value: isinstance(value, kinds) and all(map(of_item, value))
    if origin in (Mapping, dict):
        of_key, of_value = test_of(parts[0]), test_of(parts[1])
        return lambda value: isinstance(value, Mapping) and all(map(of_key, value)) and all(map(of_value, value.values()))
    if isinstance(origin, type):
        return lambda value: isinstance(value, origin)
    method = "__float__" if hint is float else "__index__"
    return lambda value: hasattr(type(value), method) and not isinstance(value, bool)


def _plain(hint: Any) -> tuple[type, ...]:
    """The classes whose instances are the values of a type hint; empty for one that says more."""
    parts = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    plain = (get_origin(part) is None and isinstance(part, type) and part not in (int, float) for part in parts)
    return parts if all(plain) else ()


def words_of(hint: Any) -> str:
    """A type hint in the words of a message."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(words_of, parts)))
    if origin is Literal:
        return " or ".join(map(repr, parts))
    if origin is Callable:
        return "a function"
    if origin is tuple and len(parts) > 1 and parts[-1] is not Ellipsis:
        return f"a pair of {' and '.join(map(words_of, parts))}"
    if origin in _SEQUENCES or origin is Iterable:
        items = "strings" if parts[0] is str else ", ".join(part.__name__ for part in get_args(parts[0]) or parts[:1])
        return f"a {_COLLECTIONS.get(origin, 'list')} of {items}"
    if origin in (Mapping, dict):
        return "a mapping"
    if origin is AbstractContextManager:
        return "a context manager"
    return _WORDS.get(hint) or f"a{'n' * (hint.__name__[0] in 'AEIO')} {hint.__name__}"
