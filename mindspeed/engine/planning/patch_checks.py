"""Checks of a set of patches before anything is touched, and against the contracts of the Megatron that a plan is for."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from mindspeed.engine.inspection.contract_reading import successors
from mindspeed.engine.inspection.contracts import ABSENT, Contract, ContractVerdict, compare, contract_for, difference, part_of
from mindspeed.engine.inspection.megatron_copies import megatron_version, package_root
from mindspeed.engine.inspection.sites import Site, near_targets
from mindspeed.engine.inspection.target_info import TargetInfo, find_places, is_installed
from mindspeed.engine.planning.plan import PlannedPatch
from mindspeed.engine.resolution.environment import SUPPORTED_MEGATRON, UNTESTED_MEGATRON, version_in
from mindspeed.engine.resolution.planned_feature import PlanNote
from mindspeed.plugins.patches import Mixin, Replace, Set, Wrap
from mindspeed.problems import Fix, Problem, advice, suggestion

Places = Mapping[str, TargetInfo]
"""The place of every target, and of every cache to be cleared, of some patches: what `target_infos_of` gives."""

PATCH_A_METHOD = "patch a method of the class instead, or use a setting of the feature for a configuration value"
WRAP_A_METHOD = "wrap one of its methods, or use Mixin"


def with_sites(patches: Sequence[PlannedPatch], version: str | None = None, places: Places | None = None) -> list[PlannedPatch]:
    """The patches with their sites looked up; a target that does not exist keeps its name.

    ``version`` is the megatron-core that the patches are for; without one it is what is installed here. ``places`` spares
    looking for them again.
    """
    places = places or target_infos_of(patches, version)
    return [replace(planned, site=_site_of(planned, places)) for planned in patches]


def _site_of(planned: PlannedPatch, places: Places) -> str:
    """Return the name of the site of a patch; that of its target where it does not exist."""
    site = places[planned.patch.target].site
    return site.name if site is not None else planned.patch.target


def check_patches(patches: Sequence[PlannedPatch], version: str | None = None, places: Places | None = None) -> list[Problem]:
    """Every problem of a set of patches: missing, unsuitable or changed targets, and conflicting patches.

    The patches of the base plan and those of features are two layers: a feature may replace what the base left.
    """
    active = [planned for planned in patches if not planned.skipped]
    places = places or target_infos_of(active, version)
    problems = [problem for planned in active for problem in _check_target(planned, places, version)]
    for ground in (True, False):
        problems += _conflicts([planned for planned in active if planned.ground == ground], places)
    return list(dict.fromkeys(problems))


def check_contracts(patches: Sequence[PlannedPatch], version: str | None) -> list[Problem]:
    """Find differences between the Megatron that a plan is for and the installed one; none where none is installed.

    MS306 for another version than the plan's; MS401 and MS407 for targets that are not those of its version.
    """
    here = megatron_version()
    if version is None or here is None:
        return []
    if here != version:
        text = f"the plan was made for megatron-core {version}, but {here} is installed"
        return [Problem("MS306", text, fix=Fix.advise(f"install megatron-core {version}, or make the plan again"))]
    active = [planned for planned in patches if not planned.skipped]
    places = target_infos_of(active, version)
    found = [problem for planned in active for problem in _broken(planned, places, version)]
    found += [_unfit(planned, why) for planned in active if (why := _other_code(planned, places, version))]
    return list(dict.fromkeys(found))


def without_other_code(patches: Sequence[PlannedPatch], version: str | None, places: Places) -> list[PlannedPatch]:
    """The patches, of which those for recorded code are skipped where the target has other code."""
    return [
        replace(planned, skipped=why) if not planned.skipped and (why := _other_code(planned, places, version)) else planned
        for planned in patches
    ]


def _other_code(planned: PlannedPatch, places: Places, version: str | None) -> str:
    """Return why a patch for recorded code does not fit its target; empty where it does, and for any other patch."""
    when = planned.patch.when
    if when is None or not when.recorded or version is None:
        return ""
    found, known = places[planned.patch.target].contract, contract_for(planned.patch.target, version)
    if found is None or known is None or compare(known[1], found) == "same":
        return ""
    return f"its code is not that of megatron-core {known[0]}"


def notes_on(patches: Sequence[PlannedPatch], version: str | None, places: Places | None = None) -> list[PlanNote]:
    """List notes on targets that are no problem: other code than recorded, or no record to compare with."""
    active = [planned for planned in patches if not planned.skipped]
    places = places or target_infos_of(active, version)
    if version is None:
        root = package_root("core")
        text = f"{root} does not contain its version, so its functions are not compared with a release"
        return [PlanNote("warning", "megatron-core", text)] if root is not None and active else []
    is_here = is_installed(version)  # asks the import system
    notes = [note for planned in active for note in _notes(planned, places, version, is_here)]
    return [*_untested(active, places, version), *dict.fromkeys(notes)]


def _untested(active: Sequence[PlannedPatch], places: Places, version: str) -> Iterator[PlanNote]:
    """A warning for a release that is newer than those that features are tested on, with the verdicts of the plan's targets."""
    if not version_in(version, UNTESTED_MEGATRON):
        return
    text = f"megatron-core {version} is newer than the releases that features are tested on, {SUPPORTED_MEGATRON}"
    verdicts_of: dict[str, set[ContractVerdict]] = defaultdict(set)
    for planned in active:
        target = planned.patch.target
        release, found = contract_for(target, version), places[target].contract
        if release is not None and found is not None:
            verdicts_of[target].add(compare(release[1], found, _by_name(planned)))
    counts = Counter("changed" if "changed" in found else min(found) for found in verdicts_of.values())
    verdicts = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
    if verdicts and is_installed(version):
        text += f"; targets of this plan: {verdicts}"
    yield PlanNote("warning", "megatron-core", text)


def _notes(planned: PlannedPatch, places: Places, version: str, is_here: bool) -> Iterator[PlanNote]:
    target = planned.patch.target
    known, contract = contract_for(target, version), places[target].contract
    if part_of(target) is None:
        return
    if known is None:
        yield PlanNote("note", planned.owner, f"{target} has no recorded contract to compare with")
    elif is_here and contract is not None:
        verdict = compare(known[1], contract, _by_name(planned))
        if verdict in ("appended", "body changed"):
            more = "more parameters" if verdict == "appended" else "other code"
            yield PlanNote("note", planned.owner, f"{target} has {more}, unlike in megatron-core {known[0]}")


def target_infos_of(patches: Sequence[PlannedPatch], version: str | None) -> dict[str, TargetInfo]:
    """Find the target and the caches of every patch."""
    return find_places((name for planned in patches for name in (planned.patch.target, *planned.patch.clears)), version)


def missing_target(owner: str, target: str, where: str = "") -> Problem:
    """MS401 for a target that does not exist, with similar names."""
    fix = suggestion(near_targets(target), f"install a version of the patched package that {owner} supports, or remove {owner}")
    return Problem("MS401", f"{owner} patches {target}, which does not exist", (owner,), where=where, fix=advice(fix))


def unsuitable_target(owner: str, kind: str, target: str, why: str, fix: str, where: str = "") -> Problem:
    """MS403: a patch of this kind cannot be applied to this target."""
    return Problem(
        "MS403", f"the {kind} of {target} by {owner} cannot be applied: {why}", (owner,), where=where, fix=advice(fix)
    )


def _check_target(planned: PlannedPatch, places: Places, version: str | None) -> Iterator[Problem]:
    yield from _broken(planned, places, version)
    owner, patch, place = planned.owner, planned.patch, places[planned.patch.target]
    if place.site is None:
        return
    site, where = place.site, _where(place.site)
    if isinstance(patch, Replace | Mixin) and place.barrier:
        yield unsuitable_target(owner, patch.kind, site.name, place.barrier, PATCH_A_METHOD, where)
    elif isinstance(patch, Wrap) and site.kind == "class":
        yield unsuitable_target(owner, "wrap", site.name, "the target is a class", WRAP_A_METHOD, where)
    elif isinstance(patch, Mixin) and site.kind in ("function", "method"):
        yield unsuitable_target(owner, "mixin", site.name, "the target is not a class", "use Wrap or Replace", where)


def _broken(planned: PlannedPatch, places: Places, version: str | None) -> Iterator[Problem]:
    """MS401 for what does not exist, MS407 for a target that is not the recorded one."""
    for name in (planned.patch.target, *planned.patch.clears):
        if places[name].site is None:
            gone = _gone(planned.owner, name, places[name], version) if version is not None else None
            yield gone or missing_target(planned.owner, name)
    place = places[planned.patch.target]
    if version is not None and place.site is not None and place.contract is not None:
        yield from _changed(planned, place.site, place.contract, version)


def _gone(owner: str, target: str, place: TargetInfo, version: str) -> Problem | None:
    """MS401 for a target that a recorded release has and this one has not, with what took its place; else None."""
    known = contract_for(target, version)
    if known is None:
        return None
    release, recorded = known
    near = place.contract.near if place.contract is not None else tuple(successors(target, recorded))
    chain = (f"in megatron-core {release} it is {_described(recorded)}",) if recorded.kind != ABSENT else ()
    text = f"{owner} patches {target}, which does not exist in megatron-core {version}"
    return Problem(
        "MS401",
        text,
        (owner,),
        chain,
        fix=advice(suggestion(near, f"install a version of the patched package that {owner} supports, or remove {owner}")),
    )


def _changed(planned: PlannedPatch, site: Site, contract: Contract, version: str) -> Iterator[Problem]:
    """MS407 when what is installed has another kind or other parameters than the release it calls itself."""
    owner, target = planned.owner, planned.patch.target
    known = contract_for(target, version)
    if known is None or compare(known[1], contract, _by_name(planned)) != "changed":
        return
    release, recorded = known
    untested = version_in(version, UNTESTED_MEGATRON)
    differs = f"has changed since megatron-core {release}" if untested else f"differs from that of megatron-core {release}"
    text = f"{target}, which {owner} patches, {differs}: {difference(recorded, contract)}"
    chain = (
        f"megatron-core {release} has {_described(recorded)}",
        f"megatron-core {version} here has {_described(contract)}",
    )
    fix = f"install megatron-core {release}{'' if untested else ' as it was released'}, or remove {owner}"
    yield Problem("MS407", text, (owner,), chain, _where(site), advice(fix))


def _unfit(planned: PlannedPatch, why: str) -> Problem:
    """MS407 for a planned patch that this process would leave out."""
    text = f"{planned.owner} does not fit the {planned.patch.target} that is installed: {why}"
    return Problem("MS407", text, (planned.owner,), fix=Fix.advise("make the plan again, with the Megatron of the ranks"))


def _by_name(planned: PlannedPatch) -> bool:
    return isinstance(planned.patch, Wrap) and planned.patch.by_name


def _described(contract: Contract) -> str:
    return f"a {contract.kind} {contract.signature}".rstrip()


def _where(site: Site) -> str:
    return f"{site.file}:{site.line}" if site.line else site.file


def _conflicts(patches: Sequence[PlannedPatch], places: Places) -> Iterator[Problem]:
    by_site: dict[str, list[PlannedPatch]] = defaultdict(list)
    for planned in patches:
        by_site[_site_of(planned, places)].append(planned)
    for site, here in by_site.items():
        replacing = [planned for planned in here if isinstance(planned.patch, Replace)]
        if len(replacing) > 1:
            owners = _and(replacing)
            text = (
                f"{owners} replace {site}, but only one feature can" if " and " in owners else f"{owners} replaces {site} twice"
            )
            yield _conflict(replacing, text)
        setting = [planned for planned in here if isinstance(planned.patch, Set)]
        if len({repr(planned.patch.value) for planned in setting}) > 1:
            values = " and ".join(sorted(f"{planned.owner} sets it to {planned.patch.value!r}" for planned in setting))
            yield _conflict(setting, f"{site} cannot have two values: {values}")
        owner = site
        while "." in owner.partition(":")[2]:
            owner = owner.rpartition(".")[0]
            for planned in by_site.get(owner, ()):
                if isinstance(planned.patch, Replace):
                    member = site.rpartition(".")[2]
                    text = f"{planned.owner} replaces the class {owner}, but {_and(here)} patches its member {member}"
                    yield _conflict([planned, *here], text)


def _conflict(patches: Sequence[PlannedPatch], text: str) -> Problem:
    owners = tuple(sorted({planned.owner for planned in patches}))
    chain = tuple(sorted(f"{p.owner}: {p.patch.kind} of {p.patch.target}, {p.patch.reason}" for p in patches))
    return Problem("MS402", text, owners, chain, fix=Fix.advise(f"remove {' or '.join(owners)}"))


def _and(patches: Iterable[PlannedPatch]) -> str:
    return " and ".join(sorted({planned.owner for planned in patches}))
