"""Exchange shared objects, such as flags and functions of other packages, where a module imports a patched name."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, Final

from mindspeed.engine.inspection.sites import inside_tree
from mindspeed.engine.inspection.target_info import importers
from mindspeed.engine.patching.aliases import BENEATH, module_dictionaries
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
        if not module.startswith(BENEATH) and not ids.isdisjoint(map(id, entries.values()))
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
