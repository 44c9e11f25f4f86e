"""Exchange shared objects, such as flags and functions of other packages, where a module imports a patched name."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, Final

from mindspeed.engine.inspection.sites import inside_tree
from mindspeed.engine.inspection.target_info import importers
from mindspeed.engine.patching.aliases import module_dictionaries
from mindspeed.engine.patching.journal import ITEM, Journal
from mindspeed.engine.patching.site_patch import PatchedSite

_BENEATH: Final = ("torch.", "numpy.", "sympy.")
"""Packages that import neither Megatron nor any feature, and have most of the modules of a process."""

_COMMON: Final = (bool, type(None))
"""Types of values that hundreds of unrelated names share."""


def follow_imports(bounds: Sequence[PatchedSite], journal: Journal, back: bool = False) -> Counter[str]:
    """Exchange shared objects in the modules that import their names from the sites; ``back`` gives the originals back.

    Names of Megatron are found under any other name too; names of other packages, and those of True, False or
    None, which every module has, only under their own. Returns how many names were found, by site.
    """
    shared: dict[int, list[tuple[PatchedSite, Any, Any]]] = defaultdict(list)
    for bound in bounds:
        if len(bound.group.path) == 1:
            old, new = (bound.current, bound.original) if back else (bound.original, bound.current)
            shared[id(old)].append((bound, old, new))
    found = [
        (module, entries, key, bound, old, new)
        for module, entries in (_that_may_import(bounds) if shared else ())
        if not shared.keys().isdisjoint(map(id, entries.values()))
        for key, value in entries.items()
        for bound, old, new in shared.get(id(value), ())
        if module != bound.group.module
        and (key == bound.name or (inside_tree(bound.group.module) and not isinstance(old, _COMMON)))
    ]
    imported = importers([(module, key, bound.group.site) for module, _, key, bound, _, _ in found])
    counts: Counter[str] = Counter()
    for module, entries, key, bound, old, new in found:
        if (module, key, bound.group.site) in imported:
            journal.write(ITEM, entries, key, old, new)
            counts[bound.group.site] += 1
    return counts


def _that_may_import(bounds: Sequence[PatchedSite]) -> list[tuple[str, dict[str, Any]]]:
    """The loaded modules that may import what some sites bind."""
    if any(bound.group.module.startswith(_BENEATH) for bound in bounds):
        return module_dictionaries()
    return module_dictionaries([name for name in sys.modules if not name.startswith(_BENEATH)])
