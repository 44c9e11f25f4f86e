"""The resolver: a pure function from a request to active features in order, or to all problems.

Deciding a fixed request is unit propagation, so every phase is linear: settings, world, requirements
to a fixed point, slots and conflicts, checks, order. Predicates read only their feature's own arguments
and the world, which are fixed before propagation; one that reads an unknown value is *not checked*.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from mindspeed import __version__
from mindspeed.activation.arguments import Arguments, flag
from mindspeed.activation.environment import Environment, version_in
from mindspeed.activation.order import Edges
from mindspeed.activation.plan import PlannedFeature, Row, Value
from mindspeed.activation.request import Layer
from mindspeed.activation.settings import Merged, merge
from mindspeed.plugins.constraints import (
    After,
    Before,
    Check,
    Conflicts,
    Constraint,
    Predicate,
    Requires,
    RequiresAny,
    RequiresSlot,
    Supersedes,
)
from mindspeed.plugins.discovery import BUILT_IN, Catalog
from mindspeed.plugins.feature import Feature, FeatureArgs, FeatureSpec
from mindspeed.plugins.problems import Problem
from mindspeed.plugins.world import FIELDS, PARALLEL_SIZES, UnknownValue, World

HasVariant = Callable[[str, str], bool]
"""``(op, platform) -> bool``: whether an operator has more than its reference there."""


@dataclass(slots=True)
class Active:
    """Why a feature is active: ``parent`` names the feature that required it, "" is the request itself."""

    reason: str
    parent: str = ""


@dataclass(slots=True)
class Resolution:
    """What the resolver decided. Without problems, ``features`` is the activation order."""

    world: World
    level: int
    features: tuple[PlannedFeature, ...] = ()
    base: tuple[PlannedFeature, ...] = ()
    args: dict[str, FeatureArgs] = field(default_factory=dict)
    supersedes: tuple[tuple[str, str, str], ...] = ()
    rows: list[Row] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def resolve(
    layers: Sequence[Layer],
    catalog: Catalog,
    environment: Environment,
    base: Sequence[type[Feature[Any]]] = (),
    has_variant: HasVariant = lambda op, platform: True,
) -> Resolution:
    """Decide a request. Pure and total: never raises for bad input, reports every problem it can find.

    ``base`` are the plugins of level 0 that every plan has; only their settings are decided here.
    """
    return _Resolver(merge(layers, catalog, environment), catalog, base, has_variant).run(environment)


class _Resolver:
    """State of one resolution; thrown away with it."""

    def __init__(self, merged: Merged, catalog: Catalog, base: Sequence[type[Feature[Any]]], has_variant: HasVariant) -> None:
        self.merged = merged
        self.catalog = catalog
        self.base = {feature.spec.name: feature for feature in base}
        self.has_variant = has_variant
        self.world = merged.as_world()
        self.active: dict[str, Active] = {}
        self.args: dict[str, FeatureArgs] = {}
        self.rows: list[Row] = []
        self.problems: list[Problem] = list(merged.problems)
        self.arguments = Arguments(merged.settings)

    def run(self, environment: Environment) -> Resolution:
        self.problems += environment.problems()
        self._check_sizes()
        self._propagate(self._roots())
        self._report_idle_settings()
        self._check_choices()
        self._check_slots()
        self._check_conflicts()
        self._check_platforms()
        self._run_checks()
        order = self._order()
        for name in self.base:
            self._args(name)
        result = Resolution(self.world, self.merged.level, args=self.args, rows=self.rows, problems=self.problems)
        if not self.problems:
            result.features = tuple(self._planned(name, self._why(name)) for name in order)
            result.base = tuple(self._planned(name, ("every plan has it",)) for name in self.base)
            result.supersedes = tuple((n, c.name, c.reason) for n, c in self._constraints(Supersedes) if c.name in self.active)
        return result

    def feature(self, name: str) -> type[Feature[Any]]:
        return self.base[name] if name in self.base else self.catalog.feature(name)

    def spec(self, name: str) -> FeatureSpec:
        return self.feature(name).spec

    # -- what starts it ---------------------------------------------------------------------------------------

    def _roots(self) -> Iterator[tuple[str, Active]]:
        """Every name that the request itself makes active, with its reason."""
        for name, source in self.merged.requested.items():
            if name in self.merged.without:
                text = f"{name} is requested ({source}) and taken out ({self.merged.without[name]})"
                self.problems.append(Problem("MS210", text, (name,), fix=f"drop {name} from one of the two"))
            elif self._known(name, source):
                if self.spec(name).level > self.merged.level:
                    level = self.spec(name).level
                    text = f"{name} has optimization level {level}, this job has {self.merged.level}"
                    self.problems.append(Problem("MS207", text, (name,), fix=f"--optimization-level {level}"))
                yield name, Active("you asked for it")
        for name, source in self.merged.without.items():
            if name not in self.merged.requested:
                self._known(name, source)
        yield from self._owners_of_sizes()
        if self.merged.level >= 1:
            yield from self._level_one()

    def _known(self, name: str, source: str) -> bool:
        if name in self.catalog.usable:
            return True
        if name in self.catalog.broken:
            problem = self.catalog.broken[name].problem
            if problem is not None and problem not in self.problems:
                self.problems.append(problem)
            return False
        near = self.catalog.near(name)
        fix = f"did you mean {' or '.join(near)}?" if near else "mindspeed features list shows every name"
        self.problems.append(Problem("MS201", f"there is no feature {name!r}", (name,), where=source, fix=fix))
        return False

    def _owners_of_sizes(self) -> Iterator[tuple[str, Active]]:
        for size in (*PARALLEL_SIZES, "dp"):
            if not self.world.knows(size) or getattr(self.world, size) <= 1:
                continue
            meaning = "data-parallel size" if size == "dp" else FIELDS[size][1]
            value = getattr(self.world, size)
            if size in self.catalog.owners:
                owner = self.catalog.owners[size][0]
                if owner not in self.merged.without:
                    yield owner, Active(f"the {meaning} is {value}")
                elif size != "dp":
                    text = f"the {meaning} is {value}, and {owner}, which provides it, is taken out"
                    self.problems.append(Problem("MS210", text, (owner,), fix=f"drop --without {owner} or set --{size} 1"))
            elif size != "dp":
                text = f"the {meaning} is {value}, and no installed feature provides it"
                self.problems.append(Problem("MS209", text, fix=f"--{size} 1"))

    def _level_one(self) -> Iterator[tuple[str, Active]]:
        for name, row in self.catalog.usable.items():
            spec = self.spec(name)
            if spec.level != 1 or name in self.merged.requested:
                continue
            if left_out := self._left_out(name, spec):
                self.rows.append(Row("left-out", name, left_out))
            else:
                yield name, Active(f"optimization level 1 switches it on ({row.distribution})")

    def _left_out(self, name: str, spec: FeatureSpec) -> str:
        """Why level 1 does not switch a feature on, or ''."""
        if name in self.merged.without:
            return "taken out by --without"
        platform = str(self.world.platform)
        if spec.platforms and platform not in spec.platforms:
            return f"not for {platform}"
        if spec.numerics.claim not in ("exact", "reordered"):
            return f"its numerics are {spec.numerics.claim}"
        if missing := [op for op in spec.ops if not self.has_variant(op, platform)]:
            return f"only the reference of {', '.join(missing)} exists on {platform}"
        args = self._args(name)
        if args is None:
            return "its settings are not valid"
        try:
            return "" if spec.applies(args, self.world) else "it does not apply to this model"
        except UnknownValue as unknown:
            return f"whether it applies depends on {flag(unknown.field)}, which is not known"

    # -- requirements -----------------------------------------------------------------------------------------

    def _propagate(self, roots: Iterator[tuple[str, Active]]) -> None:
        queue = deque[tuple[str, Active]](roots)
        while queue:
            name, why = queue.popleft()
            if name in self.active:
                continue
            self.active[name] = why
            self._args(name)
            for constraint in self.spec(name).constraints:
                if isinstance(constraint, Requires) and constraint.name not in self.active and self._holds(name, constraint):
                    self._require(name, constraint, queue)

    def _require(self, name: str, constraint: Requires, queue: deque[tuple[str, Active]]) -> None:
        needed, because = constraint.name, f", because {constraint.reason}" if constraint.reason else ""
        if needed in self.merged.without:
            text = f"{name} requires {needed}{because}, and {needed} is taken out"
            self._problem("MS210", text, (name, needed), f"drop --without {needed}, or take out {name}")
        elif self.merged.strict and needed not in self.merged.requested:
            text = f"{name} requires {needed}{because}"
            self._problem("MS204", text, (name, needed), f"add {needed} to the features, or drop --strict")
        elif self._known(needed, f"required by {name}"):
            queue.append((needed, Active(f"required by {name}{because}", name)))

    def _check_choices(self) -> None:
        holders = self._holders()
        for name, constraint in self._constraints(RequiresAny):
            if not any(choice in self.active for choice in constraint.names):
                reason = f", because {constraint.reason}" if constraint.reason else ""
                choices = ", ".join(constraint.names)
                self._problem(
                    "MS205", f"{name} needs one of {choices}{reason}", (name,), f"add one of {choices} to the features"
                )
        for name, need in self._constraints(RequiresSlot):
            if need.slot not in holders:
                reason = f", because {need.reason}" if need.reason else ""
                able = ", ".join(sorted(n for n in self.catalog.usable if need.slot in self.spec(n).slots))
                text = f"{name} needs a feature for {need.slot}{reason}"
                self._problem("MS205", text, (name,), f"add one of {able} to the features")

    # -- exclusions -------------------------------------------------------------------------------------------

    def _holders(self) -> dict[str, list[str]]:
        holders: dict[str, list[str]] = defaultdict(list)
        for name in sorted(self.active):
            for slot in self.spec(name).slots:
                holders[slot].append(name)
        return holders

    def _check_slots(self) -> None:
        for slot, names in sorted(self._holders().items()):
            if len(names) > 1:
                self._problem("MS203", f"{_listing(names)} all hold the slot {slot}", tuple(names), self._ways_out(names))

    def _check_conflicts(self) -> None:
        seen: set[frozenset[str]] = set()
        holders = self._holders()
        for name, constraint in self._constraints(Conflicts):
            others = holders.get(constraint.name, []) if constraint.name in holders else [constraint.name]
            for other in others:
                pair = frozenset((name, other))
                if other == name or other not in self.active or pair in seen:
                    continue
                seen.add(pair)
                because = f", because {constraint.reason}" if constraint.reason else ""
                names = tuple(sorted(pair))
                self._problem("MS202", f"{names[0]} and {names[1]} exclude each other{because}", names, self._ways_out(names))

    def _ways_out(self, names: Sequence[str]) -> str:
        """The smallest removals: for each side, the requested feature at the root of its chain."""
        roots = dict.fromkeys(self._root(name) for name in names)
        return " or ".join(f"take out {root}" for root in roots)

    def _root(self, name: str) -> str:
        while self.active[name].parent:
            name = self.active[name].parent
        return name

    # -- checks -----------------------------------------------------------------------------------------------

    def _check_sizes(self) -> None:
        world = self.world
        product = world.tp * world.pp * world.cp
        if world.knows("world_size") and world.world_size % product:
            factors = f"tp x pp x cp = {world.tp} x {world.pp} x {world.cp} = {product}"
            text = f"world size {world.world_size} is not a multiple of {factors}"
            fix = f"--world-size {-(-world.world_size // product) * product}, or smaller parallel sizes"
            self.problems.append(Problem("MS302", text, fix=fix))

    def _check_platforms(self) -> None:
        platform = str(self.world.platform)
        for name in self.active:
            spec = self.spec(name)
            if spec.platforms and platform not in spec.platforms:
                text = f"{name} does not run on {platform}, only on {', '.join(sorted(spec.platforms))}"
                self._problem("MS208", text, (name,), f"take out {self._root(name)}")
            if spec.megatron and self.world.knows("megatron") and not version_in(self.world.megatron, spec.megatron):
                text = f"{name} needs megatron-core {spec.megatron}, this is {self.world.megatron}"
                self._problem(
                    "MS208", text, (name,), f"install a megatron-core {spec.megatron}, or take out {self._root(name)}"
                )

    def _run_checks(self) -> None:
        for name, check in self._constraints(Check):
            args = self._args(name)
            if args is None:
                continue
            try:
                if check.test(args, self.world):
                    continue
                message, fix = (text.format(args=args, world=self.world) for text in (check.message, check.fix))
            except UnknownValue as unknown:
                self._not_checked(name, unknown, check.message)
                continue
            except Exception as error:  # a plugin's predicate may fail in any way; the message must name the plugin
                self._problem(
                    "MS901", f"a check of {name} failed itself: {type(error).__name__}: {error}", (name,), "report it"
                )
                continue
            self._problem("MS304", f"{name}: {message}", (name,), fix)

    def _not_checked(self, name: str, unknown: UnknownValue, what: str) -> None:
        flag = flag(unknown.field)
        if self.merged.strict:
            self._problem(
                "MS307", f"{name}: {unknown.field} is not known, so this is not checked: {what!r}", (name,), f"give {flag}"
            )
        else:
            self.rows.append(Row("not-checked", name, f"{what!r} depends on {unknown.field}; give {flag}"))

    def _args(self, name: str) -> FeatureArgs | None:
        """The validated arguments of a feature, or None after their problems were reported."""
        if name not in self.args:
            args = self.arguments.validate(name, self.feature(name).Args)
            if isinstance(args, FeatureArgs):
                self.args[name] = args
                return args
            self.problems += [problem for problem in args if problem not in self.problems]
            return None
        return self.args[name]

    def _report_idle_settings(self) -> None:
        for name, fields in self.merged.settings.items():
            sources = ", ".join(sorted({value.source for value in fields.values()}))
            if name in self.base:
                continue
            if name not in self.catalog.usable:
                self._known(name, sources)
                continue
            owned = {argument for owner, argument in self.catalog.owners.values() if owner == name}
            idle = [key for key, value in fields.items() if not (key in owned and value.value == 1)]
            if name not in self.active and idle:
                self._args(name)
                self.rows.append(Row("note", name, f"settings are given ({sources}), but the feature is not active"))

    def _order(self) -> list[str]:
        edges = Edges(self.active)
        for name in self.active:
            for constraint in self.spec(name).constraints:
                if isinstance(constraint, After | Requires | Supersedes) and self._holds(name, constraint):
                    edges.add(constraint.name, name, declared_by=name)
                elif isinstance(constraint, Before) and self._holds(name, constraint):
                    edges.add(name, constraint.name, declared_by=name)
        order = edges.sorted()
        if len(order) < len(self.active):
            cycle, steps = edges.cycle(order)
            text = f"the order has a cycle: {' -> '.join(cycle)}"
            self.problems.append(Problem("MS206", text, tuple(cycle[:-1]), steps, fix="take out one of them"))
        return order

    # -- shared -----------------------------------------------------------------------------------------------

    def _constraints(self, kind: type[Any]) -> Iterator[tuple[str, Any]]:
        """Constraints of one kind over the active features, whose ``when`` holds."""
        for name in sorted(self.active):
            for constraint in self.spec(name).constraints:
                if isinstance(constraint, kind) and self._holds(name, constraint):
                    yield name, constraint

    def _holds(self, name: str, constraint: Constraint) -> bool:
        when: Predicate | None = constraint.when
        if when is None:
            return True
        args = self._args(name)
        if args is None:
            return False
        try:
            return bool(when(args, self.world))
        except UnknownValue as unknown:
            target = getattr(constraint, "name", None) or getattr(constraint, "message", "")
            self._not_checked(name, unknown, f"{type(constraint).__name__} {target}")
            return False
        except Exception as error:  # see _run_checks
            self._problem(
                "MS901", f"a condition of {name} failed itself: {type(error).__name__}: {error}", (name,), "report it"
            )
            return False

    def _failed_itself(self, what: str, name: str, error: Exception) -> None:
        text = f"{what} of {name} failed itself: {type(error).__name__}: {error}"
        self._problem("MS901", text, (name,), f"report it to the authors of {self.catalog.usable[name].distribution}")

    def _problem(self, code: str, message: str, names: tuple[str, ...], fix: str) -> None:
        chain = tuple(line for name in names if name in self.active for line in self._why(name))
        where = "; ".join(self.catalog.usable[name].where for name in names if name in self.catalog.usable)
        problem = Problem(code, message, names, chain, where, fix)
        if problem not in self.problems:
            self.problems.append(problem)

    def _why(self, name: str) -> tuple[str, ...]:
        """The chain of reasons from ``name`` back to the request."""
        lines = []
        while name:
            lines.append(f"{name}: {self.active[name].reason}")
            name = self.active[name].parent
        return tuple(lines)

    def _planned(self, name: str, why: tuple[str, ...]) -> PlannedFeature:
        row = self.catalog.usable.get(name)
        distribution, version = (row.distribution, row.version) if row else (BUILT_IN, __version__)
        spec = self.spec(name)
        given = self.merged.settings.get(name, {})
        settings = {
            key: Value(value, given[key].source, given[key].overrode) if key in given else Value(value, "default")
            for key, value in self.args[name].model_dump(mode="json").items()
        }
        return PlannedFeature(name, distribution, version, why, settings, spec.level, tuple(sorted(spec.slots)))


def _listing(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"
