"""Patching modules right after they execute: a finder that adds one step to what the other finders find."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class PatchFinder(MetaPathFinder):
    """Stands first on ``sys.meta_path`` and watches the modules of some top-level packages.

    ``executed(module, nested)`` is called after each of them has run, ``finished()`` when the outermost of the running
    imports has ended. Specs and modules look afterwards as if the finder had not been there.
    """

    patches_modules = True

    def __init__(
        self, packages: Collection[str], executed: Callable[[ModuleType, bool], None], finished: Callable[[], None]
    ) -> None:
        self.packages = frozenset(packages)
        self._executed = executed
        self._finished = finished
        self._thread = _ThreadState()

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The spec that the other finders give, with a loader that reports back."""
        if name.partition(".")[0] not in self.packages or name in self._thread.searching:
            return None
        self._thread.searching.add(name)  # a finder may ask the whole chain again
        try:
            spec = self._ask_others(name, path, target)
        finally:
            self._thread.searching.discard(name)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _ReportingLoader(spec.loader, self)  # type: ignore[assignment]
        return spec

    def _ask_others(self, name: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        for finder in list(sys.meta_path):
            find_spec = getattr(finder, "find_spec", None) if finder is not self else None
            spec: ModuleSpec | None = find_spec(name, path, target) if find_spec is not None else None
            if spec is not None:
                return spec
        return None

    def run(self, loader: Any, module: ModuleType) -> None:
        """Execute a module with its loader, then report."""
        state = self._thread
        state.depth += 1
        try:
            loader.exec_module(module)
            self._executed(module, state.depth > 1)
        finally:
            state.depth -= 1
        if state.depth == 0:
            self._finished()


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.depth = 0
        self.searching: set[str] = set()


class _ReportingLoader:
    """Stands in for a loader until the module runs."""

    def __init__(self, loader: Any, finder: PatchFinder) -> None:
        self._loader = loader
        self._finder = finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._finder.run(self._loader, module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
