"""The functions whose calls show that an algorithm of a feature runs."""

from __future__ import annotations

import sys
from types import FunctionType


def functions_of_modules(names: str) -> list[FunctionType]:
    """Return the functions and methods of modules, but for special methods and those that dataclasses share with all others."""
    found: list[FunctionType] = []
    for name in set(names.split(", ")) & sys.modules.keys():
        own = [value for value in vars(sys.modules[name]).values() if getattr(value, "__module__", "") == name]
        values = [*own, *(value for each in own if isinstance(each, type) for value in vars(each).values())]
        found += [value for value in values if isinstance(value, FunctionType) and value.__module__ == name]
    return [function for function in found if not function.__name__.startswith("__")]
