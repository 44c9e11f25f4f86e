"""Shared objects, such as a flag or a function that another package defines: who has one because it imports a site's name."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Final

from mindspeed.inspection.sites import inside_tree
from mindspeed.inspection.target_info import importers
from mindspeed.patching.aliases import module_dictionaries
from mindspeed.patching.journal import ABSENT, ITEM, Journal
from mindspeed.patching.site_patch import PatchedSite

_BENEATH: Final = ("torch.", "numpy.", "sympy.")
"""Packages that import neither Megatron nor any feature, and have most of the modules of a process."""

_COMMON: Final = (bool, type(None))
"""Types of values that hundreds of unrelated names share."""


def follow_imports(bounds: Sequence[PatchedSite], journal: Journal, back: bool = False) -> dict[str, int]:
    """Exchange shared objects in the modules that import their names from the sites; ``back`` gives the originals back.

    Names of Megatron are found under any other name too; names of other packages, and those of True, False or
    None, which every module has, only under their own.

    Returns how many names were found, by site.
    """
    counts: dict[str, int] = {}
    by_name: list[tuple[PatchedSite, Any, Any]] = []
    by_value: dict[int, list[tuple[PatchedSite, Any, Any]]] = {}
    for bound in bounds:
        if len(bound.group.path) == 1:
            old, new = (bound.current, bound.original) if back else (bound.original, bound.current)
            telling = inside_tree(bound.group.module) and not isinstance(old, _COMMON)
            into = by_value.setdefault(id(old), []) if telling else by_name
            into.append((bound, old, new))

    modules = _that_may_import(bounds) if by_name or by_value else []
    found: list[tuple[str, dict[str, Any], str, tuple[PatchedSite, Any, Any]]] = []
    for one in by_name:
        name, old = one[0].name, one[1]
        found += [(module, entries, name, one) for module, entries in modules if entries.get(name, ABSENT) is old]
    for module, entries in modules if by_value else ():
        if not by_value.keys().isdisjoint(map(id, entries.values())):
            found += [(module, entries, key, one) for key, value in entries.items() for one in by_value.get(id(value), ())]
    named = [(module, key, one[0].group.site) for module, _, key, one in found if module != one[0].group.module]
    imported = importers(named)
    for module, entries, key, (bound, old, new) in found:
        if (module, key, bound.group.site) in imported:
            journal.write(ITEM, entries, key, old, new)
            counts[bound.group.site] = counts.get(bound.group.site, 0) + 1
    return counts


def _that_may_import(bounds: Sequence[PatchedSite]) -> list[tuple[str, dict[str, Any]]]:
    """The loaded modules that may import what some sites bind."""
    if any(bound.group.module.startswith(_BENEATH) for bound in bounds):
        return module_dictionaries()
    return module_dictionaries([name for name in sys.modules if not name.startswith(_BENEATH)])
