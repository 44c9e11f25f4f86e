"""The surroundings of a set of features under test: those that its members declare, merged. Light, without torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mindspeed import plugins as ms
from mindspeed.engine.resolution.request import Layer
from mindspeed.plugins.discovery import Catalog
from mindspeed.problems import ResolutionError


@dataclass(frozen=True, slots=True)
class DeclaredSurroundings:
    """Features, settings and sizes in addition to a set under test.

    Features in ``both`` are in the baseline as well, those in ``tested`` are not. ``note`` says what of the declared
    surroundings is missing, and why.
    """

    both: tuple[str, ...] = ()
    tested: tuple[str, ...] = ()
    layers: tuple[Layer, ...] = ()
    note: str = ""


def surroundings_of(names: Sequence[str], known: Catalog) -> Iterator[DeclaredSurroundings]:
    """Yield the surroundings in which the set may be verified: all that its members declare, then with one change, then none.

    Changed is that all of it is under test, that a feature is added that could serve a member too, that a setting is missing,
    or that the features are missing that one member declares. Raises ResolutionError where members contradict one another.
    """
    specs = {name: known.feature(name).spec for name in names if name in known.usable}
    merged = _merge(specs, known)
    yield merged
    if merged.both and len(specs) > 1:
        yield replace(merged, both=(), tested=(*merged.both, *merged.tested))
    for name, spec in specs.items():
        for option in _others_that_serve(spec, names):
            yield _merge(specs, known, more=option)
        for owner, values in spec.verify_with.settings.items():
            for key, value in values.items():
                note = f"{name} is verified without {owner}.{key}={value}"
                yield _merge(_without_setting(specs, name, owner, key), known, note=note)
    for name, spec in specs.items():
        if declared := [beside for beside in spec.verify_with.features if beside not in names]:
            bare = {**specs, name: replace(spec, verify_with=replace(spec.verify_with, features=()))}
            note = f"{name} is verified without {' and '.join(declared)}"
            for option in _others_that_serve(spec, names):
                yield _merge(bare, known, more=option, note=f"{note}, with {option}")
            yield _merge(bare, known, note=note)
    if any(spec.verify_with.world or spec.verify_with.settings for spec in specs.values()):
        yield DeclaredSurroundings(note=f"{' and '.join(specs)}: without the surroundings that they declare")


def _without_setting(specs: Mapping[str, ms.FeatureSpec], name: str, owner: str, key: str) -> dict[str, ms.FeatureSpec]:
    """The declarations with one of them changed: its surroundings lack a setting."""
    declared = specs[name].verify_with
    kept = {other: value for other, value in declared.settings[owner].items() if other != key}
    changed = replace(declared, settings={**declared.settings, owner: kept})
    return {**specs, name: replace(specs[name], verify_with=changed)}


def required_by(names: Iterable[str], known: Catalog, perhaps: bool = False) -> frozenset[str]:
    """These features and all that they always require, or with ``perhaps`` may require, as far as they are known."""
    found: set[str] = set()
    todo = [name for name in names if name in known.usable]
    while todo:
        name = todo.pop()
        found.add(name)
        constraints: Iterable[Any] = known.feature(name).spec.constraints
        required = (c.name for c in constraints if isinstance(c, ms.Requires) and (perhaps or c.when is None))
        todo += [name for name in required if name not in found]
    return frozenset(found)


def _merge(specs: Mapping[str, ms.FeatureSpec], known: Catalog, more: str = "", note: str = "") -> DeclaredSurroundings:
    """Merge what ``specs`` declare, and one feature more.

    What one member is compared without is not in the baseline of another; nor is what computes for a member, as attention over
    ranks does for documents: without the member it computes something else.
    """
    declared = dict.fromkeys(beside for spec in specs.values() for beside in spec.verify_with.features)
    if more:
        declared[more] = None
    compared, computing = set[str](), set[str]()
    for name, spec in specs.items():
        computing |= {constraint.slot for constraint in spec.constraints if isinstance(constraint, ms.RequiresCapability)}
        compared |= required_by([name], known) - required_by(spec.verify_with.features, known)
    beside = [name for name in declared if name not in specs]
    slots = {name: known.feature(name).spec.slots for name in beside}
    tested = tuple(name for name in beside if required_by([name], known) & compared or slots[name] & computing)
    both = tuple(name for name in beside if name not in tested)
    active = required_by((*specs, *beside), known, perhaps=True)  # settings of a feature that is missing are no help
    settings: dict[str, dict[str, Any]] = {}
    world: dict[str, Any] = {}
    owners: dict[Any, str] = {}
    for name, spec in specs.items():
        _add(world, spec.verify_with.world, name, owners, "")
        for owner in spec.verify_with.settings.keys() & active:
            _add(settings.setdefault(owner, {}), spec.verify_with.settings[owner], name, owners, owner)
    return DeclaredSurroundings(both, tested, (Layer("declared surroundings", settings=settings, world=world),), note)


def _add(merged: dict[str, Any], given: Mapping[str, Any], name: str, owners: dict[Any, str], feature: str) -> None:
    """Add a member's values; the greatest of numbers serves every member, and other values must be equal."""
    for key, value in given.items():
        before = merged.get(key, value)
        numbers = all(isinstance(one, int | float) and not isinstance(one, bool) for one in (before, value))
        if value != before and not numbers:
            what = f"{feature}.{key}" if feature else key
            text = f"{owners[feature, key]} is verified with {what} {before}, but {name} with {what} {value}"
            fix = ms.Fix.give_setting(what) if feature else ms.Fix.give_field(key)
            raise ResolutionError([ms.Problem("MS304", text, (owners[feature, key], name), fix=fix)])
        merged[key] = max(before, value) if numbers else value
        owners.setdefault((feature, key), name)


def _others_that_serve(spec: ms.FeatureSpec, names: Sequence[str]) -> Iterator[str]:
    """Features one of which a member needs, and which it does not declare."""
    for constraint in spec.constraints:
        if isinstance(constraint, ms.RequiresAny):
            yield from (name for name in constraint.names if name not in (*names, *spec.verify_with.features))
