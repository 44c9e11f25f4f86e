"""Where targets are and what they are, in the Megatron installed here or in a recorded one."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mindspeed.inspection.contract_reading import read_contract
from mindspeed.inspection.contracts import ABSENT, Contract, contract_for, part_of
from mindspeed.inspection.source_cache import memory_of
from mindspeed.inspection.sites import Site, find_site, follows_to, may_import
from mindspeed.inspection.source import files_consulted, find_module, trees_kept
from mindspeed.inspection.megatron_copies import megatron_portions, megatron_version


@dataclass(frozen=True, slots=True)
class Place:
    """A target: its site (None when there is no such name), why its class cannot be replaced, and its contract.

    The contract is None for a target outside Megatron.
    """

    site: Site | None
    barrier: str = ""
    contract: Contract | None = None


def is_installed(version: str | None) -> bool:
    """Whether a plan for this version is one for the Megatron that is installed here; one for no version is."""
    return version is None or version == megatron_version()


def find_places(targets: Iterable[str], version: str | None = None) -> dict[str, Place]:
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
    memory = memory_of(megatron_portions(), now=False)  # a loaded module is as its file was
    found = set()
    for module, key, site in names:
        row = f"{module}:{key} imports {site}"
        known = memory.recall(row, bool)
        if known is None:
            with files_consulted() as files:
                known = may_import(module, site.rpartition(":")[2], key) and follows_to(f"{module}:{key}", site)
            if files:
                memory.keep(row, known, files)
        if known:
            found.add((module, key, site))
    memory.save()
    return found


def _outside(target: str) -> Place:
    site = find_site(target)
    return Place(site, site.barrier if site is not None else "")


def _recorded(target: str, version: str) -> Place:
    module, _, qualname = target.partition(":")
    if part_of(target) is None:
        return _outside(target)
    known = contract_for(target, version)
    if known is None:
        return Place(Site(module, qualname, ABSENT))
    contract = known[1]
    if contract.kind == ABSENT:
        return Place(None, contract=contract)
    module, _, qualname = (contract.site or target).partition(":")
    kind = "method" if contract.kind in ("staticmethod", "classmethod", "property") else contract.kind
    return Place(Site(module, qualname, kind), contract=contract)


def _read(target: str) -> Place:
    site = find_site(target)
    if site is None or site.kind == ABSENT:
        return Place(site)
    return Place(site, site.barrier, read_contract(target))


def _read_here(targets: Sequence[str]) -> dict[str, Place]:
    """The places of targets in the installed Megatron, remembered or read now."""
    memory = memory_of(megatron_portions())
    places = {}
    with trees_kept():
        for target in targets:
            known = memory.recall(target, _from_json)
            if known is not None:
                places[target] = known
                continue
            with files_consulted() as files:
                places[target] = _read(target)
            if files and find_module(target.partition(":")[0]) is not None:  # a module that is missing may be added
                memory.keep(target, _to_json(places[target]), files)
    memory.save()
    return places


def _to_json(place: Place) -> dict[str, Any]:
    contract = place.contract.to_json() if place.contract is not None else None
    return {"site": asdict(place.site) if place.site is not None else None, "barrier": place.barrier, "contract": contract}


def _from_json(row: dict[str, Any]) -> Place:
    contract = Contract(**row["contract"]) if row["contract"] is not None else None
    return Place(Site(**row["site"]) if row["site"] is not None else None, row["barrier"], contract)
