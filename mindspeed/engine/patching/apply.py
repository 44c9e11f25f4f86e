"""The patch engine: checks a set of patches, applies it all or not at all, reports it, and undoes it exactly."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from operator import attrgetter
from types import ModuleType
from typing import Any

from mindspeed.engine.inspection.sites import awaits_checkout, find_site
from mindspeed.engine.inspection.source import find_module
from mindspeed.engine.patching.aliases import Rebinder
from mindspeed.engine.patching.imports import PatchFinder, follow_imports
from mindspeed.engine.patching.journal import Journal
from mindspeed.engine.patching.site_patch import (
    PatchedSite,
    SitePatches,
    by_site,
    import_values,
    loaded_object,
    locate,
    value_key,
)
from mindspeed.engine.patching.stale_references import stale_holders
from mindspeed.engine.planning.patch_checks import missing_target
from mindspeed.engine.planning.plan import PlannedPatch
from mindspeed.plugins.patches import Set
from mindspeed.problems import Fix, PatchError, Problem
from mindspeed.process.gc_pause import collector_paused
from mindspeed.process.tracing import trace

_lock = threading.RLock()


@dataclass(frozen=True, slots=True)
class SiteReport:
    """Report a patched site: owners, kinds of patches, the number of aliases rebound, whether its module is yet to come."""

    site: str
    owners: tuple[str, ...]
    kinds: tuple[str, ...]
    aliases: int
    pending: bool


Watch = Callable[[PlannedPatch, Any], None]
"""``watch(patch, made)`` is called for every patch that was bound, with the function or class that was made for it."""


def apply(patches: Sequence[PlannedPatch], watch: Watch | None = None) -> AppliedPatches:
    """Apply a checked set of patches; skipped ones are ignored.

    Loaded modules are patched now, others right after they execute. Raises PatchError with all problems, and then
    nothing has changed.
    """
    with collector_paused():
        applied = AppliedPatches(by_site(patches), watch)
        applied.start()
    return applied


class AppliedPatches:
    """Patches that are in force: their report, and the way back."""

    def __init__(self, groups: Sequence[SitePatches], watch: Watch | None = None) -> None:
        self._groups = groups
        self._watch = watch
        self._by_module: dict[str, list[SitePatches]] = {}
        for group in groups:
            self._by_module.setdefault(group.module, []).append(group)
        packages = {module.partition(".")[0] for module in self._by_module}
        self._finder = PatchFinder(packages, self._executed, self._finished)
        self._journal = Journal()
        self._bound: list[PatchedSite] = []
        self._new: list[PatchedSite] = []
        self._postponed: list[str] = []
        self._by_name: dict[tuple[Any, ...], PatchedSite] = {}
        self._aliases: Counter[str] = Counter()

    def start(self) -> None:
        """Install the finder and patch what is loaded. Raises PatchError after undoing everything."""
        if self._groups:
            # before the patches: importing a replacement may load further targets; first: no finder may hide a module from it
            sys.meta_path.insert(0, self._finder)
        try:
            loaded = [group for group in self._groups if group.module in sys.modules]
            _all(_check_importable, [group for group in self._groups if group.module not in sys.modules])
            bound = self._patch(loaded)
            self._rebind(bound)
        except BaseException:
            self.undo()
            raise

    @property
    def sites(self) -> tuple[SiteReport, ...]:
        """Every site in plan order."""
        done = {bound.group.site for bound in self._bound}
        return tuple(
            SiteReport(
                group.site,
                tuple(dict.fromkeys(planned.owner for planned in group.patches)),
                tuple(planned.patch.kind for planned in group.patches),
                self._aliases[group.site],
                group.site not in done,
            )
            for group in self._groups
        )

    def holds(self, site: str) -> bool | None:
        """Return whether a site still holds what was bound there; None while its module is not imported."""
        bound = next((one for one in self._bound if one.group.site == site), None)
        return bound.holds() if bound is not None else None

    def undo(self) -> None:
        """Restore every original, also in modules that were imported since and hold a patched object."""
        with _lock:
            with suppress(ValueError):  # it is not there
                sys.meta_path.remove(self._finder)
            try:
                self._journal.undo()
            finally:
                self._give_back(self._bound, Journal())
                for records in (self._bound, self._by_name, self._new, self._postponed):
                    records.clear()
                _clear_caches(self._groups)
            trace("undone", f"{len(self._groups)} sites")

    @contextmanager
    def suspended(self, site: str) -> Iterator[None]:
        """Put the original back at one site for the length of a with-block. Raises PatchError for an unknown site."""
        found = find_site(site)
        names = {site, found.name if found is not None else site}
        if names.isdisjoint(group.site for group in self._groups):
            text = f"suspended() cannot put back the original of {site}, because the active plan does not patch this target"
            fix = Fix.advise("pass a target that the plan patches; mindspeed features plan --all lists them")
            raise PatchError([Problem("MS401", text, fix=fix)])
        journal = Journal()
        with _lock:
            suspended = [bound for bound in self._bound if bound.group.site in names]
            for bound in reversed(suspended):
                bound.restore(journal)
            self._give_back(suspended, journal)
        try:
            yield
        finally:
            with _lock:
                journal.undo()
                self._rebind(suspended)

    def audit(self) -> list[Problem]:
        """MS404 for every closure, partial and live instance that still holds an original, MS412 for every function of other
        code that a patch has replaced. Walks the heap."""
        with _lock:
            stale = stale_holders(self._bound, [change.new for change in self._journal.changes])
        return stale + [_displaced(one, name) for one in self._bound if (name := one.displaced())]

    def _patch(self, groups: Sequence[SitePatches]) -> list[PatchedSite]:
        """Bind the sites of loaded modules; all replacements are imported before anything is touched."""
        values: dict[str, Any] = {}
        _all(lambda group: values.update(import_values(group)), groups)
        with _lock:
            changes, bound = len(self._journal.changes), len(self._bound)
            try:
                _clear_caches(groups)
                deepest_first = sorted(groups, key=lambda group: -len(group.path))
                for layer in (attrgetter("ground"), attrgetter("own")):
                    for group in deepest_first:
                        if layer(group):
                            self._bind(group, layer(group), values)
            except BaseException:
                self._journal.undo(changes)
                del self._bound[bound:]
                raise
            return self._bound[bound:]

    def _bind(self, group: SitePatches, layer: Sequence[PlannedPatch], values: Mapping[str, Any]) -> None:
        """Apply one layer of a site; over the base plan's layer where that has been applied before."""
        found = locate(group)
        for name in found.names():
            other = self._by_name.get(name)
            if other is not None and other.group.site != group.site:
                if _sets(layer, values, other.current):  # a build where two names are one object: the rebinding reaches both
                    found.current = other.current
                    self._bound.append(found)
                    return
                text = f"{group.site} and {other.group.site} are two names of one object, and both are patched"
                owners = (other.group.owner, group.owner)
                raise PatchError(
                    [Problem("MS402", text, owners, fix=Fix.advise("patch the name in the module that defines it"))]
                )
        below = self._by_name.get(found.names()[0])
        bound = below if below is not None and below.current is found.original else found
        if any(layer is done for done in bound.applied):
            return  # a reload has left this name as it was
        parts = bound.apply(layer, values, self._journal)
        for planned in layer:
            trace("patched", f"{group.site}: {planned.patch.kind} of {planned.owner}")
        if self._watch is not None:
            for planned, made in parts:
                self._watch(planned, made)
        self._by_name |= dict.fromkeys(bound.names(), bound)
        if bound is found:
            self._bound.append(bound)

    def _rebind(self, bound: Sequence[PatchedSite], modules: Sequence[str] | None = None) -> None:
        """Give the patched object to the other holders: everywhere, or in the modules named."""
        with _lock:
            for site, count in follow_imports([one for one in bound if one.shared], self._journal).items():
                self._aliases[site] += count
            exchanges = [exchange for one in bound for exchange in one.exchanges()]
            if exchanges:
                rebinder = Rebinder(exchanges, _packages(bound), self._journal)
                rebinder.rebind(modules)
                for one in bound:
                    self._aliases[one.group.site] += rebinder.counts.get(id(one.original), 0)

    def _give_back(self, bound: Sequence[PatchedSite], journal: Journal) -> None:
        """Give the originals to every holder of a patched object."""
        follow_imports([one for one in bound if not one.fresh], journal, back=True)
        exchanges = [exchange for one in bound for exchange in one.returns()]
        if exchanges:
            Rebinder(exchanges, _packages(bound), journal).rebind()

    def _executed(self, module: ModuleType, nested: bool) -> None:
        """Patch a module that has just run, or later when its imports cannot be completed yet."""
        groups = self._by_module.get(module.__name__, [])
        if not groups:
            return
        top = sys.modules.get(module.__name__.partition(".")[0])
        if nested and getattr(getattr(top, "__spec__", None), "_initializing", False):
            self._postponed.append(module.__name__)
            return
        try:
            bound = self._patch(groups)
        except PatchError:
            if not nested:
                raise
            self._postponed.append(module.__name__)  # a replacement may need what is only half imported now
            return
        self._rebind(bound, [module.__name__])
        self._new += bound

    def _finished(self) -> None:
        """An import has ended: patch what had to wait, and find holders that got an original through circular imports."""
        with _lock:
            postponed, self._postponed = self._postponed, []
        try:
            bound = self._patch([group for name in postponed if name in sys.modules for group in self._by_module[name]])
        except BaseException:
            self._postponed += postponed  # the next import says so again
            raise
        with _lock:
            new, self._new = self._new + bound, []
        self._rebind(new)


def _displaced(bound: PatchedSite, name: str) -> Problem:
    owner = bound.group.owner
    text = (
        f"{name} had replaced {bound.group.site} before {owner} was activated, and is not called, because {owner} replaces it "
        "too"
    )
    fix = (Fix.remove_feature(bound.group.own[0].owner), Fix.advise("do not load the code that put it there"))
    return Problem("MS412", text, (owner,), fix=fix)


def _packages(bound: Sequence[PatchedSite]) -> set[str]:
    """Top-level packages of some sites."""
    return {one.group.module.partition(".")[0] for one in bound}


def _sets(layer: Sequence[PlannedPatch], values: Mapping[str, Any], value: Any) -> bool:
    """Return whether a layer does nothing but set this very object."""
    return all(isinstance(planned.patch, Set) and values[value_key(planned)] is value for planned in layer)


def _all(action: Callable[[SitePatches], None], groups: Sequence[SitePatches]) -> None:
    """Do something for every group. Raises one PatchError with the problems of all."""
    problems: list[Problem] = []
    for group in groups:
        try:
            action(group)
        except PatchError as error:
            problems += error.problems
    if problems:
        raise PatchError(dict.fromkeys(problems))


def _check_importable(group: SitePatches) -> None:
    if find_module(group.module) is None and not awaits_checkout(group.module):
        raise PatchError([missing_target(planned.owner, planned.patch.target) for planned in group.patches])


def _clear_caches(groups: Sequence[SitePatches]) -> None:
    """Clear the ``lru_cache``s that the patches name, in modules that are loaded."""
    for name in {name: None for group in groups for planned in group.patches for name in planned.patch.clears}:
        cached = loaded_object(name)
        if hasattr(cached, "cache_clear"):
            cached.cache_clear()
