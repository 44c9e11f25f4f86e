"""Which configurations are feasible: the declarations of features, tabulated over the sizes that they read.

A predicate is called once for each distinct combination of the values that it reads, and the answers are spread over all
layouts. No rule stands here twice: only how kinds of constraints combine, as `mindspeed.engine.resolution` does it for one job.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from mindspeed.engine.resolution.environment import version_in
from mindspeed.job.world import PARALLEL_SIZES, UnknownValue, World
from mindspeed.plugins.answers import answer
from mindspeed.plugins.conditions import Condition, Predicate, obstacle
from mindspeed.plugins.constraints import (
    AUTO,
    Conflicts,
    RequiresAny,
    RequiresCapability,
    RequiresSlot,
)
from mindspeed.plugins.discovery import Catalog
from mindspeed.plugins.feature import FeatureSpec
from mindspeed.tuning.space import SIZES, Choice, Layouts

Mask = NDArray[np.bool_]
HasVariant = Callable[[str, str], bool]
Settings = Mapping[str, Mapping[str, Any]]
_NOTHING: Final[Mapping[str, Any]] = {}
_RELATIONS: Final = (RequiresAny, RequiresSlot, Conflicts, RequiresCapability)
"""Constraints on other features; settings are told apart by identity, for choices share them."""


@dataclass(frozen=True, slots=True)
class FixedRequest:
    """What every configuration of a search has: requested features, settings, removed features, level."""

    features: tuple[str, ...] = ()
    settings: Settings = field(default_factory=dict)
    without: Collection[str] = ()
    level: int = 2


class ReadWorld(World):
    """A world that notes which of its varied values are read."""

    def __init__(self, values: Mapping[str, Any], read: set[str]) -> None:
        super().__init__(values)
        object.__setattr__(self, "_read", read)

    def __getattribute__(self, name: str) -> Any:
        if name in SIZES:
            object.__getattribute__(self, "_read").add(name)
        return super().__getattribute__(name)

    @property
    def dp(self) -> int:
        self._read.add("dp")
        return World(self.known()).dp

    @property
    def num_micro_batches(self) -> int:
        self._read.add("num_micro_batches")
        return World(self.known()).num_micro_batches


class Rules:
    """Tables of the predicates of a catalog over the layouts of one search."""

    def __init__(self, catalog: Catalog, layouts: Layouts, request: FixedRequest, has_variant: HasVariant) -> None:
        self.catalog, self.layouts, self.request = catalog, layouts, request
        self.has_variant = has_variant
        self.all: Mask = np.ones(len(layouts), dtype=np.bool_)
        self.platform = str(layouts.model["platform"])
        self._tables: dict[tuple[Any, ...], Mask] = {}
        self._applies = {name: partial(_applies, catalog, name) for name in catalog.usable}
        self._holding = {name: partial(_holds_slots, catalog, name) for name in catalog.usable}
        self._faults: dict[tuple[str, int], Mask] = {}
        self._relations = {
            name: [constraint for constraint in spec.constraints if isinstance(constraint, _RELATIONS)]
            for name, spec in catalog.specs.items()
        }
        self._roots = self._root_masks()

    def feasible(self, choice: Choice) -> Mask:
        """Return for each layout whether the resolver takes the choice with it."""
        return self.taken(choice)[0]

    def taken(self, choice: Choice) -> tuple[Mask, dict[str, Mask]]:
        """Return for each layout whether the resolver takes the choice with it, and where each feature is active then."""
        settings = {**self.request.settings, **choice.settings}
        requested = dict.fromkeys((*self.request.features, *choice.features))
        good: Mask = self.layouts.divides.copy()
        if any(self._is_refused(name) for name in requested):
            return np.zeros_like(good), {}
        active = dict(self._roots) | dict.fromkeys(requested, self.all)
        good &= self._close(active, settings)
        for name, mask in active.items():
            good &= ~(mask & self._own_faults(name, settings))
        holders = self._holders(active, settings)
        for masks in holders.values():
            if len(masks) > 1:
                good &= np.sum(list(masks.values()), axis=0) <= 1
        for name, mask in active.items():
            for constraint in self._relations[name]:
                good &= ~(mask & self._broken(name, constraint, active, holders, settings))
        return good, active

    def _own_faults(self, name: str, settings: Settings) -> Mask:
        """Return where a feature refuses a layout by itself: its settings, its platform, its checks."""
        key = (name, id(settings.get(name, _NOTHING)))
        if key not in self._faults:
            spec = self.catalog.specs[name]
            bad = ~self.all if self._valid(name, settings) and self._runs_here(spec) else self.all.copy()
            for check in spec.constraints:
                if isinstance(check, Condition) and check.otherwise == "refuse" and not check.of:
                    broken = ~self._table(name, settings, check.holds, unknown=True)
                    if check.served:
                        broken = broken & (self.layouts.columns[check.served] > 1)
                    bad |= broken if check.when is None else broken & self._table(name, settings, check.when, unknown=False)
            self._faults[key] = bad
        return self._faults[key]

    def _broken(
        self,
        name: str,
        constraint: Any,
        active: Mapping[str, Mask],
        holders: Mapping[str, Mapping[str, Mask]],
        settings: Settings,
    ) -> Mask:
        """Return where a constraint of an active feature on others does not hold."""
        bad: Mask
        if isinstance(constraint, RequiresAny):
            bad = ~_any([active[other] for other in constraint.names if other in active], self.all)
        elif isinstance(constraint, RequiresSlot):
            bad = ~_any(list(holders.get(constraint.slot, {}).values()), self.all)
        elif isinstance(constraint, Conflicts):
            others = holders[constraint.name] if constraint.name in holders else _only(active, constraint.name)
            bad = _any([mask for other, mask in others.items() if other != name], self.all)
        else:
            lacking = [
                mask
                for other, mask in holders.get(constraint.slot, {}).items()
                if other != name and constraint.capability not in self.catalog.specs[other].provides
            ]
            bad = _any(lacking, self.all)
        if constraint.when is not None:
            bad = bad & self._table(name, settings, constraint.when, unknown=False)
        return bad

    def _root_masks(self) -> dict[str, Mask]:
        """Return the features that sizes and level 1 switch on, and where."""
        roots: dict[str, Mask] = {}
        for size in (*PARALLEL_SIZES, "dp"):
            owner, _ = self.catalog.owners.get(size, ("", None))
            if owner:
                mask = self.layouts.columns[size] > 1
                roots[owner] = roots[owner] | mask if owner in roots else mask
        for name in self.catalog.level_one if self.request.level >= 1 else ():
            spec = self.catalog.specs[name]
            claims = spec.numerics.claim in ("exact", "reordered")
            here = not spec.platforms or self.platform in spec.platforms
            if name in self.request.without or not (claims and here) or name in self.request.features:
                continue
            if all(self.has_variant(op, self.platform) for op in spec.ops):
                roots[name] = self._table(name, self.request.settings, self._applies[name], unknown=False)
        return {name: mask for name, mask in roots.items() if mask.any()}

    def _close(self, active: dict[str, Mask], settings: Settings) -> Mask:
        """Add what active features require, to a fixed point; return where all of it may be added."""
        good: Mask = self.all.copy()
        queue = list(active)
        while queue:
            name = queue.pop()
            needs: list[tuple[str, Any]] = [(constraint.name, constraint) for constraint in self.catalog.requires.get(name, ())]
            needs += self._named_holders(name, settings)
            for needed, constraint in needs:
                mask = active[name]
                if constraint.when is not None:
                    mask = mask & self._table(name, settings, constraint.when, unknown=False)
                if not mask.any():
                    continue
                if needed in self.request.without or needed not in self.catalog.usable:
                    good &= ~mask
                    continue
                before = active.get(needed)
                if before is None or (mask & ~before).any():
                    active[needed] = mask if before is None else before | mask
                    queue.append(needed)
        for name in self.request.without:
            if name in active:
                good &= ~active[name]
        return good

    def _named_holders(self, name: str, settings: Settings) -> list[tuple[str, RequiresSlot]]:
        """Return the holders of slots that settings of a feature name."""
        found = []
        for constraint in self.catalog.specs[name].constraints:
            if isinstance(constraint, RequiresSlot) and constraint.setting:
                holder = settings.get(name, {}).get(constraint.setting)
                if isinstance(holder, str) and holder != AUTO:
                    found.append((holder, constraint))
        return found

    def _holders(self, active: Mapping[str, Mask], settings: Settings) -> dict[str, dict[str, Mask]]:
        holders: dict[str, dict[str, Mask]] = {}
        for name, mask in active.items():
            spec = self.catalog.specs[name]
            if spec.slots:
                mask = mask & self._table(name, settings, self._holding[name], unknown=False)
            for slot in spec.slots:
                holders.setdefault(slot, {})[name] = mask
        return holders

    def _is_refused(self, name: str) -> bool:
        if name not in self.catalog.usable or name in self.request.without:
            return True
        return self.catalog.specs[name].level > self.request.level

    def _runs_here(self, spec: FeatureSpec) -> bool:
        known = self.layouts.model.get("megatron")
        fits = not (spec.megatron and known) or version_in(str(known), spec.megatron)
        return fits and (not spec.platforms or self.platform in spec.platforms)

    def _valid(self, name: str, settings: Settings) -> bool:
        try:
            self.catalog.models[name](**settings.get(name, {}))
        except ValidationError:
            return False
        return True

    def _table(self, name: str, settings: Settings, predicate: Predicate, unknown: bool) -> Mask:
        """Return a predicate of a feature for each layout; ``unknown`` where it reads what nobody gave."""
        values = settings.get(name, _NOTHING)
        key = (id(predicate), name, id(values))
        if key not in self._tables:
            self._tables[key] = self._tabulated(name, values, predicate, unknown)
        return self._tables[key]

    def _tabulated(self, name: str, values: Mapping[str, Any], predicate: Predicate, unknown: bool) -> Mask:
        owned = {size: argument for size, argument in self.catalog.specs[name].sizes.items() if argument}
        fields = {size for size in owned if size in SIZES}
        while True:
            rows, inverse = self.layouts.distinct(sorted(fields))
            read: set[str] = set()
            answers = np.array([self._ask(name, values, owned, predicate, unknown, int(row), read) for row in rows])
            if read <= fields:
                return np.asarray(answers[inverse], dtype=np.bool_)
            fields |= read

    def _ask(
        self,
        name: str,
        values: Mapping[str, Any],
        owned: Mapping[str, str],
        predicate: Predicate,
        unknown: bool,
        row: int,
        read: set[str],
    ) -> bool:
        known = self.layouts.world(row)
        sizes = {argument: known[size] for size, argument in owned.items() if size in known}
        try:
            args = self.catalog.models[name](**{**values, **sizes})
            return bool(predicate(args, ReadWorld(known, read)))
        except UnknownValue:
            return unknown
        except Exception:  # a plugin's predicate may fail in any way: the resolver refuses such a job
            return False


def _applies(catalog: Catalog, name: str, args: Any, world: World) -> bool:
    """Return whether level 1 switches a feature on."""
    spec = catalog.specs[name]
    former = spec.applies is None or spec.applies(args, world)
    return former and obstacle(spec.constraints, name, args, world) is None


def _holds_slots(catalog: Catalog, name: str, args: Any, world: World) -> bool:
    """Return whether a feature holds its slots with these arguments."""
    spec = catalog.specs[name]
    held = answer(catalog.feature(name), "held_slots", args, world)
    return spec.slots_when is None or spec.slots_when(args, world) if held is None else bool(held)


def _any(masks: list[Mask], like: Mask) -> Mask:
    return np.logical_or.reduce(masks) if masks else np.zeros_like(like)


def _only(active: Mapping[str, Mask], name: str) -> dict[str, Mask]:
    return {name: active[name]} if name in active else {}
