"""Patches against the contracts of the Megatron release that a plan is for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from mindspeed.inspection.contract_reading import successors
from mindspeed.inspection.contracts import ABSENT, Contract, compare, contract_for, difference, part_of
from mindspeed.inspection.target_info import TargetInfo, is_installed
from mindspeed.planning.plan import PlannedPatch
from mindspeed.plugins.near_names import suggestion
from mindspeed.plugins.problems import Problem
from mindspeed.resolution.planned_feature import PlanNote


def missing_target_problem(planned: PlannedPatch, target: str, place: TargetInfo, version: str) -> Problem | None:
    """MS401 for a target that a recorded release has and this one has not, with what took its place; else None."""
    known = contract_for(target, version)
    if known is None:
        return None
    release, recorded = known
    owner = planned.owner
    near = place.contract.near if place.contract is not None else tuple(successors(target, recorded))
    chain = (f"megatron-core {release} has it as {_described(recorded)}",) if recorded.kind != ABSENT else ()
    text = f"{owner} patches {target}, which does not exist in megatron-core {version}"
    fix = suggestion(near, f"check which versions {owner} supports")
    return Problem("MS401", text, (owner,), chain, fix=fix)


def broken_contract(planned: PlannedPatch, place: TargetInfo, version: str) -> Problem | None:
    """MS407 when what is installed has another kind or other parameters than the release it calls itself."""
    known = contract_for(planned.patch.target, version)
    if known is None or place.contract is None or place.site is None:
        return None
    release, recorded = known
    if compare(recorded, place.contract) != "changed":
        return None
    owner, target, changed = planned.owner, planned.patch.target, difference(recorded, place.contract)
    text = f"{target}, which {owner} patches, is not the one of megatron-core {release}: {changed}"
    chain = (
        f"megatron-core {release} has {_described(recorded)}",
        f"megatron-core {version} here has {_described(place.contract)}",
    )
    where = f"{place.site.file}:{place.site.line}" if place.site.line else place.site.file
    fix = f"install megatron-core {release} as it was released, or take out {owner}"
    return Problem("MS407", text, (owner,), chain, where, fix)


def contract_rows(patches: Iterable[PlannedPatch], places: Mapping[str, TargetInfo], version: str | None) -> Iterator[PlanNote]:
    """List notes on targets that are no problem: other code than recorded, or no record to compare with."""
    if version is None:
        return
    here = is_installed(version)
    for planned in patches:
        target = planned.patch.target
        if planned.skipped or part_of(target) is None:
            continue
        known, found = contract_for(target, version), places[target].contract
        if known is None:
            yield PlanNote(
                "note", planned.owner, f"{target} has no recorded contract, so nobody has compared it with a release"
            )
        elif here and found is not None and (verdict := compare(known[1], found)) in ("appended", "body changed"):
            what = "more parameters" if verdict == "appended" else "other code"
            yield PlanNote("note", planned.owner, f"{target} has {what} here than in megatron-core {known[0]}")


def _described(contract: Contract) -> str:
    return f"a {contract.kind} {contract.signature}".rstrip()
