"""Everything that a feature author imports: ``from mindspeed import plugins as ms``.

The names are those of `mindspeed.plugins.api`, which is imported when the first of them is wanted: it needs pydantic, and
the command line can answer many questions without.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mindspeed.plugins.api import *  # noqa: F403


def __getattr__(name: str) -> object:
    if name.startswith("__") and name != "__all__":  # what Python itself asks of a module
        raise AttributeError(f"module 'mindspeed.plugins' has no attribute {name!r}")
    api = import_module("mindspeed.plugins.api")
    value: object = sorted(public for public in vars(api) if public[0] != "_") if name == "__all__" else getattr(api, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *vars(import_module("mindspeed.plugins.api"))})
