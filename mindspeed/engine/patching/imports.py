"""Patching modules right after they execute: a finder that adds one step to what the other finders find."""

from __future__ import annotations

import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

from mindspeed.engine.inspection.sites import inside_tree
from mindspeed.engine.inspection.target_info import importers
from mindspeed.engine.patching.aliases import LIBRARIES, module_dictionaries
from mindspeed.engine.patching.journal import ITEM, Journal
from mindspeed.engine.patching.site_patch import PatchedSite

_Exchange = tuple[PatchedSite, Any, Any]
"""A site with the object that others may have imported from it, and the one that they get."""

_COMMON: Final = (bool, type(None))
"""Types of values that hundreds of unrelated names share."""


def follow_imports(bounds: Sequence[PatchedSite], journal: Journal, back: bool = False) -> Counter[str]:
    """Exchange shared objects in the modules that import their names from the sites; ``back`` gives the originals back.

    Names of Megatron are found under any other name too; names of other packages, and those of True, False or
    None, which every module has, only under their own. Returns how many names were found, by site.
    """
    by_name: dict[str, list[_Exchange]] = defaultdict(list)
    by_object: dict[int, list[_Exchange]] = defaultdict(list)
    for bound in bounds:
        if len(bound.group.path) == 1:
            exchange = (bound, *((bound.current, bound.original) if back else (bound.original, bound.current)))
            if inside_tree(bound.group.module) and not isinstance(exchange[1], _COMMON):
                by_object[id(exchange[1])].append(exchange)
            else:
                by_name[bound.name].append(exchange)
    modules = module_dictionaries() if by_name or by_object else []
    ids = frozenset(by_object)
    found = [
        (module, entries, key, *exchange)
        for module, entries in modules
        for key in by_name.keys() & entries.keys()
        for exchange in by_name[key]
        if entries[key] is exchange[1] and module != exchange[0].group.module
    ]
    found += [
        (module, entries, key, *exchange)
        for module, entries in (modules if by_object else ())
        if module.partition(".")[0] not in LIBRARIES and not ids.isdisjoint(map(id, entries.values()))
        for key, value in entries.items()
        for exchange in by_object.get(id(value), ())
        if module != exchange[0].group.module
    ]
    imported = importers([(module, key, bound.group.site) for module, _, key, bound, _, _ in found])
    counts: Counter[str] = Counter()
    for module, entries, key, bound, old, new in found:
        if (module, key, bound.group.site) in imported:
            journal.write(ITEM, entries, key, old, new)
            counts[bound.group.site] += 1
    return counts


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
