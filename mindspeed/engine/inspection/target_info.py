"""Look up sites and contracts of targets, in the Megatron installed here or in a recorded one."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from pydantic import TypeAdapter

from mindspeed.engine.inspection.contract_reading import barrier_of, read_contract
from mindspeed.engine.inspection.contracts import ABSENT, Contract, contract_for, part_of
from mindspeed.engine.inspection.megatron_copies import megatron_portions, megatron_version
from mindspeed.engine.inspection.sites import Site, find_site, follows_to, may_import
from mindspeed.engine.inspection.source import trees_kept
from mindspeed.engine.inspection.source_cache import source_cache_of


@dataclass(frozen=True, slots=True)
class TargetInfo:
    """A target: its site (None for no such name), why its class cannot be replaced, its contract (None outside Megatron)."""

    site: Site | None
    barrier: str = ""
    contract: Contract | None = None


@cache
def _as_json() -> TypeAdapter[TargetInfo]:
    """Return what reads and writes the cache; made on the first use, for a recorded release needs none."""
    return TypeAdapter(TargetInfo)


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
    return {target: places[target] if target in places else TargetInfo(find_site(target)) for target in wanted}


def importers(names: Collection[tuple[str, str, str]]) -> set[tuple[str, str, str]]:
    """Of ``(module, key, site)`` those whose key in a loaded module is an import of what the site binds; cached or read."""
    if not names:
        return set()
    cache = source_cache_of(*megatron_portions())  # not revalidated, for a loaded module is as its file was
    found = {name for name in names if cache.get(" ".join(name), partial(_imports, *name))}
    cache.save()
    return found


def _imports(module: str, key: str, site: str) -> bool:
    return may_import(module, site.rpartition(":")[2], key) and follows_to(f"{module}:{key}", site)


def _recorded(target: str, version: str) -> TargetInfo:
    if part_of(target) is None:
        return TargetInfo(find_site(target))
    known = contract_for(target, version)
    if known is None:
        module, _, qualname = target.partition(":")
        return TargetInfo(Site(module, qualname, ABSENT))
    contract = known[1]
    if contract.kind == ABSENT:
        return TargetInfo(None, contract=contract)
    module, _, qualname = (contract.site or target).partition(":")
    kind = "method" if contract.kind in ("staticmethod", "classmethod", "property") else contract.kind
    return TargetInfo(Site(module, qualname, kind), contract=contract)


def _read_here(targets: Sequence[str]) -> dict[str, TargetInfo]:
    """The places of targets in the installed Megatron, cached or read now."""
    cache = source_cache_of(*megatron_portions())
    cache.revalidate()
    with trees_kept():
        rows = {target: cache.get(target, partial(_read, target)) for target in targets}
    cache.save()
    return {target: _as_json().validate_python(row) if row else TargetInfo(None) for target, row in rows.items()}


def _read(target: str) -> dict[str, Any] | None:
    """The place of a target as JSON; None for one that does not exist."""
    site = find_site(target)
    if site is None:
        return None
    contract = read_contract(target) if site.kind != ABSENT else None
    row: dict[str, Any] = _as_json().dump_python(TargetInfo(site, barrier_of(site), contract), mode="json")
    return row
