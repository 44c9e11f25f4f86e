"""Everything that a feature author imports.

The names are those of `mindspeed.plugins.api`, which is imported when the first of them is wanted: it needs pydantic, and
the command line can answer many questions without.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mindspeed.plugins.api import *  # noqa: F403


def __getattr__(name: str) -> object:
    if name.startswith("__") and name != "__all__":  # what Python itself asks of a module
        raise AttributeError(f"module 'mindspeed.plugins' has no attribute {name!r}")
    from importlib import import_module

    value: object = getattr(import_module("mindspeed.plugins.api"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    from mindspeed.plugins.api import __all__

    return sorted([*globals(), *__all__])
