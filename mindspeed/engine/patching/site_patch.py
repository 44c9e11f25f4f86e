"""Compose the patches of one site over its original and bind the object that results."""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from importlib import import_module
from types import FunctionType, ModuleType
from typing import Any, Final

from mindspeed.engine.inspection.sites import IMPORTED, OUTSIDE, find_site, inside_tree
from mindspeed.engine.inspection.source import find_module, read_scope
from mindspeed.engine.patching.aliases import MADE, Substitution
from mindspeed.engine.patching.journal import ABSENT, ATTRIBUTE, HEAP_TYPE, ITEM, Accessor, Journal
from mindspeed.engine.planning.patch_checks import PATCH_A_METHOD, WRAP_A_METHOD, missing_target, unsuitable_target
from mindspeed.engine.planning.plan import PlannedPatch
from mindspeed.plugins.patches import Mixin, Replace, Set, Wrap
from mindspeed.problems import Fix, MindSpeedError, PatchError, Problem

_RANK: Final = {Replace: 0, Mixin: 1, Wrap: 2, Set: 3}
DESCRIPTORS: Final = (staticmethod, classmethod)


@dataclass(frozen=True, slots=True)
class SitePatches:
    """All patches of one site, in the order in which they apply: the base plan's layer, then the features'."""

    site: str
    ground: tuple[PlannedPatch, ...]
    own: tuple[PlannedPatch, ...]

    @property
    def module(self) -> str:
        return self.site.partition(":")[0]

    @property
    def path(self) -> list[str]:
        return self.site.partition(":")[2].split(".")

    @property
    def patches(self) -> tuple[PlannedPatch, ...]:
        return (*self.ground, *self.own)

    @property
    def owner(self) -> str:
        """All owners, for messages."""
        return " and ".join(dict.fromkeys(planned.owner for planned in self.patches))


def by_site(patches: Sequence[PlannedPatch]) -> list[SitePatches]:
    """Group the patches that are not skipped; within a layer Replace, Mixins, Wraps, Set, each in plan order."""
    groups: dict[str, list[PlannedPatch]] = {}
    for planned in patches:
        if not planned.skipped:
            groups.setdefault(planned.site, []).append(planned)
    ranked = {site: sorted(group, key=lambda planned: _RANK[type(planned.patch)]) for site, group in groups.items()}
    return [
        SitePatches(site, tuple(p for p in group if p.ground), tuple(p for p in group if not p.ground))
        for site, group in ranked.items()
    ]


def import_value(planned: PlannedPatch) -> Any:
    """The object that a patch names (a raw descriptor where it is a member), or its scalar. Raises PatchError MS406."""
    reference = planned.reference
    if reference is None:
        return planned.patch.value
    module, _, qualname = reference.partition(":")
    try:
        holder = import_module(module)
        *owners, name = qualname.split(".")
        for part in owners:
            holder = getattr(holder, part)
        raw = vars(holder).get(name, ABSENT)
        return getattr(holder, name) if raw is ABSENT else raw
    except MindSpeedError:  # it says itself what is missing, for example the platform's package
        raise
    except Exception as error:  # importing foreign code may fail in any way
        text = f"{planned.patch.kind} of {planned.patch.target} by {planned.owner}: {reference} cannot be imported"
        reason = f"{type(error).__name__}: {error}"
        fix = (Fix.advise("correct this import, or install what it needs"), Fix.remove_feature(planned.owner))
        raise PatchError([Problem("MS406", f"{text}: {reason}", (planned.owner,), where=reference, fix=fix)]) from error


@dataclass(slots=True, eq=False)
class PatchedSite:
    """A site that one layer of patches has bound in a loaded module.

    ``original`` is what the name held (a raw descriptor in a class), ``current`` what it holds now. ``planted``: the
    class only inherited the name, or the module's own import of it failed. ``shared``: the original belongs to others
    too, so that only names imported from the site follow it. ``fresh``: the current object was made here, so that every
    holder of it got it from the site.
    """

    group: SitePatches
    holder: Any
    name: str
    original: Any
    planted: bool
    shared: bool
    current: Any = None
    fresh: bool = False
    keeping: frozenset[str] = frozenset()
    layers: tuple[type, ...] = ()
    applied: list[Sequence[PlannedPatch]] = field(default_factory=list)

    def apply(
        self, layer: Sequence[PlannedPatch], values: Mapping[str, Any], journal: Journal
    ) -> list[tuple[PlannedPatch, Any]]:
        """Compose the patches of a layer over the original and bind the result. Returns what was made for each patch."""
        parts = []
        for planned in layer:
            self.current, self.fresh = _compose(planned, values[value_key(planned)], self)
            parts.append((planned, self.current))
            if isinstance(self.current, type):
                self.layers = (*self.layers, self.current)
            if planned.reference is not None:
                self.keeping |= {planned.reference.partition(":")[0]}
        self.applied.append(layer)
        self.write(journal, self.current)
        return parts

    @property
    def _place(self) -> Accessor:
        return ATTRIBUTE if isinstance(self.holder, type) else ITEM

    def holds(self) -> bool:
        """Return whether the site still holds what was bound there."""
        return self._place.read(self.holder, self.name) is self.current

    def displaced(self) -> str:
        """Return the function or class of other code that was here in place of its definition and is called no more; or ``""``.

        Decorators that a module imports make what it defines.
        """
        inner = self.original.__func__ if isinstance(self.original, DESCRIPTORS) else self.original
        site = find_site(self.group.site)
        is_dropped = any(isinstance(planned.patch, Replace | Set) for planned in self.group.own)
        if not is_dropped or site is None or site.kind not in ("function", "class", "method"):
            return ""
        if not isinstance(inner, FunctionType | type):
            return ""
        maker = inner.__globals__["__name__"] if isinstance(inner, FunctionType) else inner.__module__
        scope = read_scope(find_module(site.module))
        bindings = (binding for found in scope.bindings.values() for binding in found) if scope is not None else ()
        makers = {site.module, __name__, *(binding.source for binding in bindings)}
        is_own = maker.partition(".")[0] in {name.partition(".")[0] for name in makers}
        return "" if is_own else f"{maker}.{inner.__qualname__}"

    def write(self, journal: Journal, value: Any) -> None:
        """Bind a value at the site itself."""
        journal.write(self._place, self.holder, self.name, self._place.read(self.holder, self.name), value)

    def restore(self, journal: Journal) -> None:
        """Bind the original at the site itself."""
        self.write(journal, ABSENT if self.planted else self.original)

    def names(self) -> list[tuple[Any, ...]]:
        """Return the identity of this site: its place, and the object unless it is shared."""
        place = (id(self.holder), self.name)
        return [place] if self.shared or self.planted else [place, (id(self.original),), (id(self.current),)]

    def exchanges(self) -> list[Substitution]:
        """Return the substitutions for all other holders; none for an original that is not this site's alone."""
        if self.planted or self.shared or self.current is self.original:
            return []
        return [
            Substitution(old, new, self.group.module, self.keeping, self.layers)
            for old, new in _pairs(self.original, self.current)
        ]

    def returns(self) -> list[Substitution]:
        """The way back: every holder of an object made here got it from the site."""
        if not self.fresh:
            return []
        return [Substitution(new, old, self.group.module) for old, new in _pairs(self.original, self.current)]


def value_key(planned: PlannedPatch) -> str:
    """Name what a patch puts in place, among everything that a plan imports."""
    return f"{planned.owner} {planned.patch.kind} {planned.patch.value!r}"


def import_values(group: SitePatches) -> dict[str, Any]:
    """Import everything that the patches of a site name."""
    return {value_key(planned): import_value(planned) for planned in group.patches}


def _pairs(old: Any, new: Any) -> list[tuple[Any, Any]]:
    """The objects to exchange: of a descriptor, also the function in it."""
    inner = isinstance(old, DESCRIPTORS) and isinstance(new, DESCRIPTORS)
    return [(old, new), (old.__func__, new.__func__)] if inner else [(old, new)]


def loaded_object(name: str) -> Any:
    """Return the object of ``"module:qualname"`` among the loaded modules, or `ABSENT`. Fires no lazy ``__getattr__``."""
    module, _, qualname = name.partition(":")
    value: Any = sys.modules.get(module)
    for part in qualname.split("."):
        value = _entry(value, part)
    return value.__func__ if isinstance(value, DESCRIPTORS) else value


def locate(group: SitePatches) -> PatchedSite:
    """Find a site in its loaded module. Raises PatchError MS401 when it does not exist, MS403 when it cannot be set."""
    holder: Any = sys.modules[group.module]
    *owners, name = group.path
    for part in owners:
        holder = _entry(holder, part)
        if not isinstance(holder, type):
            raise _missing(group)
    if owners and not holder.__flags__ & HEAP_TYPE:
        text, fix = f"{holder.__name__} is compiled and cannot be patched", "patch the name in a Python module that uses it"
        raise PatchError([unsuitable_target(p.owner, p.patch.kind, group.site, text, fix) for p in group.patches])
    original = _entry(holder, name)
    planted = original is ABSENT or (isinstance(holder, type) and name not in vars(holder))
    if original is ABSENT and not _is_optional(group):
        raise _missing(group)
    if isinstance(original, type):
        _check_class(group, original)
    entries = holder if isinstance(holder, type) else ModuleType.__getattribute__(holder, "__dict__")
    shared = not planted and _is_shared(group, holder, name, original)
    return PatchedSite(group, entries, name, original, planted, shared, current=original)


def _entry(holder: Any, name: str) -> Any:
    """The raw entry of a module, or of a class or the first of its bases that has it."""
    if isinstance(holder, type):
        return next((vars(cls)[name] for cls in holder.__mro__ if name in vars(cls)), ABSENT)
    return ModuleType.__getattribute__(holder, "__dict__").get(name, ABSENT) if isinstance(holder, ModuleType) else ABSENT


def _is_optional(group: SitePatches) -> bool:
    """Return whether a module may lack a name, for which only a value can stand in: an import that it tries has failed, or
    this build of a library outside Megatron has it not and the patch is optional."""
    site = find_site(group.site)
    if site is None or not all(isinstance(planned.patch, Set) for planned in group.patches):
        return False
    return site.kind == IMPORTED or (site.kind == OUTSIDE and all(planned.patch.optional for planned in group.patches))


def _missing(group: SitePatches) -> PatchError:
    where = getattr(sys.modules[group.module], "__file__", None) or ""
    return PatchError([missing_target(planned.owner, planned.patch.target, where) for planned in group.patches])


def _check_class(group: SitePatches, original: type) -> None:
    problems = []
    for planned in group.patches:
        kind = planned.patch.kind
        if isinstance(planned.patch, Wrap):
            problems.append(unsuitable_target(planned.owner, kind, group.site, "the target is a class", WRAP_A_METHOD))
        elif isinstance(planned.patch, Replace | Mixin) and dataclasses.is_dataclass(original):
            problems.append(unsuitable_target(planned.owner, kind, group.site, "the target is a dataclass", PATCH_A_METHOD))
    if problems:
        raise PatchError(problems)


def _is_shared(group: SitePatches, holder: Any, name: str, original: Any) -> bool:
    """Return whether the object belongs to others too, so that its other holders must keep it.

    That holds for plain values, for members that are defined elsewhere, and inside megatron for what an assignment took
    from elsewhere. Names of other packages are taken as written: all their holders follow.
    """
    if isinstance(holder, type):
        inner = original.__func__ if isinstance(original, DESCRIPTORS) else original
        return _home(inner) != (holder.__module__, f"{holder.__qualname__}.{name}")
    if not callable(original) and (type(original).__module__ == "builtins" or isinstance(original, Enum)):
        return True
    if not inside_tree(group.module) or _home(original) == (group.module, name):
        return False
    site = find_site(group.site)
    return site is None or site.kind not in ("function", "class")


def _home(value: Any) -> tuple[Any, Any]:
    """Module and qualified name that an object gives for itself."""
    return getattr(value, "__module__", None), getattr(value, "__qualname__", None)


def _compose(planned: PlannedPatch, value: Any, bound: PatchedSite) -> tuple[Any, bool]:
    """Compose one more patch; return the object for the site, and whether it was made here."""
    patch, current = planned.patch, bound.current
    if isinstance(patch, Set):
        return value, False
    if isinstance(patch, Mixin):
        if not isinstance(current, type) or not isinstance(value, type):
            what = planned.site if not isinstance(current, type) else patch.value
            raise PatchError([_not_a_class(planned, what)])
        return _subclass((value, current), bound), True
    inner = current.__func__ if isinstance(current, DESCRIPTORS) else current
    if isinstance(patch, Wrap):
        made, fresh = _wrapped(planned, value, inner, bound)
    elif isinstance(current, type) and not isinstance(value, type):
        raise PatchError([_not_a_class(planned, patch.value)])
    else:
        made, fresh = _copy(value.__func__ if isinstance(value, DESCRIPTORS) else value, bound)
    if isinstance(current, DESCRIPTORS) and not isinstance(made, DESCRIPTORS):
        return type(current)(made), True
    return made, fresh


def _not_a_class(planned: PlannedPatch, what: str) -> Problem:
    return unsuitable_target(planned.owner, planned.patch.kind, planned.site, f"{what} is not a class", "use Wrap or Replace")


def _wrapped(planned: PlannedPatch, factory: Any, original: Any, bound: PatchedSite) -> tuple[Any, bool]:
    """Call a wrapper factory on the original; copy its result where others hold it too."""
    try:
        made = factory(original)
    except Exception as error:  # a wrapper factory is foreign code
        text = f"the wrapper {planned.patch.value} of {planned.owner} failed on {planned.site}: {type(error).__name__}: {error}"
        raise PatchError(
            [Problem("MS406", text, (planned.owner,), where=planned.patch.value, fix=Fix.remove_feature(planned.owner))]
        ) from error
    if not callable(made):
        text = (
            f"the wrapper {planned.patch.value} of {planned.owner} returned {made!r}, but must return a callable that replaces "
            f"{planned.site}"
        )
        raise PatchError(
            [Problem("MS406", text, (planned.owner,), where=planned.patch.value, fix=Fix.remove_feature(planned.owner))]
        )
    if made is original:
        return made, bound.fresh
    return (made, True) if sys.getrefcount(made) <= _ALONE else _copy(made, bound)


def _references_of_a_new_object() -> int:
    made = object()
    return sys.getrefcount(made)


_ALONE: Final = _references_of_a_new_object()
"""``sys.getrefcount`` of an object that only one local variable holds."""


def _copy(value: Any, bound: PatchedSite) -> tuple[Any, bool]:
    """A function or class of our own with the content of ``value``, so that its holders can be told apart at undo.

    Other callables are bound as they are; the second value says so.
    """
    if isinstance(value, type):
        return _subclass((value,), bound), True
    if not isinstance(value, FunctionType):
        return value, False
    copy = FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, value.__closure__)
    copy.__kwdefaults__ = dict(value.__kwdefaults__) if value.__kwdefaults__ else None
    copy.__dict__.update(value.__dict__)
    for name in ("__annotate__", "__annotations__", "__type_params__"):
        if hasattr(value, name):
            setattr(copy, name, getattr(value, name))
            if name == "__annotate__":
                break
    copy.__doc__ = value.__doc__
    copy.__module__, copy.__qualname__ = _names(bound)
    copy.__name__ = copy.__qualname__.rpartition(".")[2]
    return copy, True


def _subclass(bases: tuple[type, ...], bound: PatchedSite) -> type:
    """``class Target(*bases)`` under the target's own names, so that pickles stay readable without us."""
    module, qualname = _names(bound)
    entries = {"__module__": module, "__qualname__": qualname, "__doc__": bases[0].__doc__}
    try:
        made = types.new_class(qualname.rpartition(".")[2], bases, exec_body=lambda namespace: namespace.update(entries))
    except TypeError as error:
        group, why = bound.group, f"{bases[0].__qualname__} cannot be subclassed: {error}"
        problems = [unsuitable_target(p.owner, p.patch.kind, group.site, why, "patch a method instead") for p in group.patches]
        raise PatchError(problems) from error
    MADE.add(made)
    return made


def _names(bound: PatchedSite) -> tuple[str, str]:
    """Module and qualified name of the original, or of the site where the original has none of its own."""
    inner = bound.original.__func__ if isinstance(bound.original, DESCRIPTORS) else bound.original
    if isinstance(inner, FunctionType | type) and not bound.shared and not bound.planted:
        return inner.__module__, inner.__qualname__
    return bound.group.module, ".".join(bound.group.path)
