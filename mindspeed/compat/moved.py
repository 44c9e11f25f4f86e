"""Modules of this framework that have another name now: the former one works for a release, with a warning."""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pkgutil import resolve_name
from types import ModuleType
from typing import Any, Final

from mindspeed.files.tables import table_beside

MOVED: Final[dict[str, str]] = table_beside(__file__)
"""Former names of modules and packages, and the present ones; one with a colon is an object in a module."""

STABLE: Final = ("mindspeed.conformance", "mindspeed.training")
"""Names that stay: importing them gives no warning."""


class MovedModule(ModuleType):
    """Hand out the names of the module that takes its place."""

    __path__: list[str] = []  # noqa: RUF012  # a module attribute that importing submodules needs

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(present_name(self.__name__) or ""), name)

    def __dir__(self) -> list[str]:
        return dir(import_module(present_name(self.__name__) or ""))


class _Loader:
    """Make a `MovedModule`; its names are looked up when they are wanted."""

    @staticmethod
    def create_module(spec: ModuleSpec) -> ModuleType:
        return MovedModule(spec.name)

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        """Warn about a former name, and put an object of a module in the place of the module that has its name."""
        present = present_name(module.__name__) or ""
        if not _is_below(module.__name__, STABLE):
            warnings.warn(f"{module.__name__} is {present.replace(':', '.')} now", FutureWarning, stacklevel=2)
        if ":" in present:
            sys.modules[module.__name__] = resolve_name(present)


def moved_spec(name: str) -> ModuleSpec | None:
    """Find a module by its former name; None for a name that no module had."""
    present = present_name(name)
    if present is None or find_spec(present.partition(":")[0]) is None:
        return None
    return ModuleSpec(name, _Loader(), is_package=True)  # type: ignore[arg-type]


def present_name(name: str) -> str | None:
    """Return the present name of a module that was moved, or None."""
    former = max((known for known in MOVED if _is_below(name, (known,))), key=len, default=None)
    return MOVED[former] + name[len(former) :] if former is not None else None


def _is_below(name: str, packages: tuple[str, ...]) -> bool:
    return any(f"{name}.".startswith(f"{package}.") for package in packages)
