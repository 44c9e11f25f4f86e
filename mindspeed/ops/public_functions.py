"""The public functions of an operator, whose calls show that it runs. Light."""

from __future__ import annotations

import sys
from types import FunctionType


def public_functions(name: str) -> list[FunctionType]:
    """Return the public function of a loaded operator: the one that has its name, else every one of its module."""
    module = sys.modules.get(f"mindspeed.ops.{name}")
    public = {key: value for key, value in vars(module).items() if not key.startswith("_")} if module else {}
    functions = {key: f for key, f in public.items() if isinstance(f, FunctionType) and f.__module__ == f"mindspeed.ops.{name}"}
    return [functions[name]] if name in functions else list(functions.values())
