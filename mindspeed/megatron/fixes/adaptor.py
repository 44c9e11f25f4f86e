"""MegatronAdaptor, the base layer that Ascend publishes for Megatron, in the same process. Light.

Imported before the plan is made, it keeps the functions that it has patched. A later import would patch over the plan.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, Final

from mindspeed.problems import Fix, PlatformError, Problem

ADAPTOR: Final = "megatron_adaptor"


def belongs_to_adaptor(target: str) -> bool:
    """Return whether MegatronAdaptor has patched a target of Megatron's (``module:qualname``) in this process."""
    module, _, path = target.partition(":")
    if ADAPTOR not in sys.modules or module not in sys.modules:
        return False
    value: Any = sys.modules[module]
    for name in path.split("."):
        value = getattr(value, name, None)
    defined = getattr(value, "__globals__", {}).get("__name__")  # functools.wraps copies the name of the original's module
    homes = (defined, getattr(value, "__module__", None))
    return any(str(home).partition(".")[0] == ADAPTOR for home in homes)


class AdaptorGuard(MetaPathFinder, Loader):
    """Refuses to import MegatronAdaptor while a plan is active, with MS519."""

    def install(self) -> None:
        """Watch imports, unless MegatronAdaptor was imported before."""
        if ADAPTOR not in sys.modules:
            sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """Watch imports no more."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        """Return a spec that cannot be executed, where MegatronAdaptor is installed."""
        if name != ADAPTOR or (found := PathFinder.find_spec(name, path)) is None:
            return None
        return ModuleSpec(name, self, origin=found.origin)

    def exec_module(self, module: ModuleType) -> None:
        """Raise PlatformError with MS519."""
        text = (
            "Ascend's MegatronAdaptor (module megatron_adaptor) is imported while a plan of mindspeed is active, and would "
            "replace patches of the plan"
        )
        fix = Fix.advise(
            "put 'import megatron_adaptor' before 'import mindspeed.megatron_adaptor', or delete 'import megatron_adaptor'"
        )
        where = module.__spec__.origin if module.__spec__ is not None else None
        raise PlatformError([Problem("MS519", text, where=where or ADAPTOR, fix=fix)])
