"""Where targets are and what they are, in the Megatron installed here or in a recorded one.

What is read from the installed Megatron is remembered in memory and on disk, for as long as none of the files that were
read has another size or modification time. A process then asks only for their state.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Any, Final

from mindspeed import __version__
from mindspeed.activation.contract_reading import read_contract
from mindspeed.activation.contracts import ABSENT, Contract, contract_for, part_of
from mindspeed.activation.sites import Site, find_site
from mindspeed.activation.source import files_consulted, state_of, trees_kept
from mindspeed.megatron.version import megatron_portions, megatron_version
from mindspeed.plugins.entry_points import cache_folder

_FORMAT: Final = 1
"""Part of the name of a file on disk; goes up when sites or contracts are read in another way."""


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
    places = _Memory(tuple(map(str, megatron_portions()))).places(own) if own else {}
    return {target: places[target] if target in places else _outside(target) for target in wanted}


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


_memories: dict[tuple[str, ...], dict[str, Any]] = {}


class _Memory:
    """The places in the Megatron of these folders that were read before, each with the files that it was read from."""

    def __init__(self, portions: tuple[str, ...]) -> None:
        name = blake2b("\n".join((*portions, __version__, str(_FORMAT))).encode(), digest_size=8).hexdigest()
        self.file = cache_folder() / f"sites-{name}.json"
        self.portions = portions

    def places(self, targets: Sequence[str]) -> dict[str, Place]:
        known = _memories.get(self.portions)
        if known is None:
            known = _memories[self.portions] = self._load()
        fresh = {file for file, state in known["files"].items() if _unchanged(file, state)}
        places, new = {}, False
        with trees_kept():
            for target in targets:
                row = known["targets"].get(target)
                if row is not None and fresh.issuperset(row["files"]):
                    places[target] = row["place"] if "place" in row else row.setdefault("place", _from_json(row))
                    continue
                with files_consulted() as files:
                    places[target] = _read(target)
                if files and places[target].site is not None:
                    new = True
                    known["files"] |= {file: list(state_of(file)) for file in files}
                    known["targets"][target] = {"files": sorted(files), "place": places[target]}
        if new:
            self._keep(known)
        return places

    def _load(self) -> dict[str, Any]:
        with suppress(OSError, ValueError):
            data: dict[str, Any] = json.loads(self.file.read_text(encoding="utf-8"))
            return data
        return {"files": {}, "targets": {}}

    def _keep(self, known: dict[str, Any]) -> None:
        """Write what is known; a place that cannot be written to only costs the next process the time to read again."""
        rows = {target: _to_json(row) for target, row in known["targets"].items()}
        with suppress(OSError):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.file.parent, prefix=self.file.stem)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump({"files": known["files"], "targets": rows}, file)
            os.replace(name, self.file)


def _unchanged(file: str, state: Sequence[int]) -> bool:
    try:
        return state_of(file) == tuple(state)
    except OSError:
        return False


def _to_json(row: dict[str, Any]) -> dict[str, Any]:
    place: Place | None = row.get("place")
    if place is None:
        return row
    contract = place.contract.to_json() if place.contract is not None else None
    site = asdict(place.site) if place.site is not None else None
    return {"files": row["files"], "site": site, "barrier": place.barrier, "contract": contract}


def _from_json(row: dict[str, Any]) -> Place:
    contract = Contract(**row["contract"]) if row["contract"] is not None else None
    return Place(Site(**row["site"]), row["barrier"], contract)
