"""Look up sites and contracts of targets, in the Megatron installed here or in a recorded one."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mindspeed.inspection.contract_reading import read_contract
from mindspeed.inspection.contracts import ABSENT, Contract, contract_for, part_of
from mindspeed.inspection.megatron_copies import megatron_portions, megatron_version
from mindspeed.inspection.sites import Site, find_site, follows_to, may_import
from mindspeed.inspection.source import files_consulted, find_module, trees_kept
from mindspeed.inspection.source_cache import source_cache_of


@dataclass(frozen=True, slots=True)
class TargetInfo:
    """A target: its site (None when there is no such name), why its class cannot be replaced, and its contract.

    The contract is None for a target outside Megatron.
    """

    site: Site | None
    barrier: str = ""
    contract: Contract | None = None


def is_installed(version: str | None) -> bool:
    """Return whether a plan for this version is one for the Megatron that is installed here; one for no version is."""
    return version is None or version == megatron_version()


def find_places(targets: Iterable[str], version: str | None = None) -> dict[str, TargetInfo]:
    """The place of every target in megatron-core ``version``: read here if that is installed, else as it was recorded.

    Of a release that is neither nothing is known, and every target counts as absent.
    """
    wanted = list(dict.fromkeys(targets))
    if not is_installed(version):
        return {target: _recorded(target, version or "") for target in wanted}
    own = [target for target in wanted if part_of(target) is not None]
    places = _read_here(own) if own else {}
    return {target: places[target] if target in places else _outside(target) for target in wanted}


def importers(names: Collection[tuple[str, str, str]]) -> set[tuple[str, str, str]]:
    """Of ``(module, key, site)`` those whose key in a loaded module is an import of what the site binds; remembered or read."""
    if not names:
        return set()
    cache = source_cache_of(megatron_portions(), now=False)  # a loaded module is as its file was
    found = set()
    for module, key, site in names:
        row = f"{module}:{key} imports {site}"
        known = cache.get(row, bool)
        if known is None:
            with files_consulted() as files:
                known = may_import(module, site.rpartition(":")[2], key) and follows_to(f"{module}:{key}", site)
            if files:
                cache.put(row, known, files)
        if known:
            found.add((module, key, site))
    cache.save()
    return found


def _outside(target: str) -> TargetInfo:
    site = find_site(target)
    return TargetInfo(site, site.barrier if site is not None else "")


def _recorded(target: str, version: str) -> TargetInfo:
    module, _, qualname = target.partition(":")
    if part_of(target) is None:
        return _outside(target)
    known = contract_for(target, version)
    if known is None:
        return TargetInfo(Site(module, qualname, ABSENT))
    contract = known[1]
    if contract.kind == ABSENT:
        return TargetInfo(None, contract=contract)
    module, _, qualname = (contract.site or target).partition(":")
    kind = "method" if contract.kind in ("staticmethod", "classmethod", "property") else contract.kind
    return TargetInfo(Site(module, qualname, kind), contract=contract)


def _read(target: str) -> TargetInfo:
    site = find_site(target)
    if site is None or site.kind == ABSENT:
        return TargetInfo(site)
    return TargetInfo(site, site.barrier, read_contract(target))


def _read_here(targets: Sequence[str]) -> dict[str, TargetInfo]:
    """The places of targets in the installed Megatron, remembered or read now."""
    cache = source_cache_of(megatron_portions())
    places = {}
    with trees_kept():
        for target in targets:
            known = cache.get(target, _from_json)
            if known is not None:
                places[target] = known
                continue
            with files_consulted() as files:
                places[target] = _read(target)
            if files and find_module(target.partition(":")[0]) is not None:  # a module that is missing may be added
                cache.put(target, _to_json(places[target]), files)
    cache.save()
    return places


def _to_json(place: TargetInfo) -> dict[str, Any]:
    contract = place.contract.to_json() if place.contract is not None else None
    return {"site": asdict(place.site) if place.site is not None else None, "barrier": place.barrier, "contract": contract}


def _from_json(row: dict[str, Any]) -> TargetInfo:
    contract = Contract(**row["contract"]) if row["contract"] is not None else None
    return TargetInfo(Site(**row["site"]) if row["site"] is not None else None, row["barrier"], contract)
