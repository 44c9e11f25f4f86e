"""The state that the phases of one resolution share: what is active and why, arguments, problems found so far."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mindspeed._version import __version__
from mindspeed.engine.resolution.planned_feature import PlanNote, Reason, Value
from mindspeed.engine.resolution.request import MEGATRON_DEFAULTS
from mindspeed.engine.resolution.request_merge import MergedRequest
from mindspeed.engine.resolution.setting_validation import Arguments, flag
from mindspeed.job.world import UnknownValue
from mindspeed.plugins.answers import answer, completed
from mindspeed.plugins.conditions import Condition, ConditionError, Predicate
from mindspeed.plugins.constraints import Constraint, Requires
from mindspeed.plugins.discovery import BUILT_IN, Catalog
from mindspeed.plugins.feature import Feature, FeatureArgs, FeatureSpec
from mindspeed.plugins.fixes import Advice, Fix, FixStep, GiveField, GiveSetting, RemoveFeature, advice, named_in
from mindspeed.plugins.near_names import suggestion
from mindspeed.plugins.problems import GivenValue, Problem

HasVariant = Callable[[str, str], bool]
"""``(op, platform) -> bool``: whether an operator has more than its reference there."""


def because(reason: str) -> str:
    """The reason of a constraint as the end of a sentence; empty without one."""
    return f", because {reason}" if reason else ""


class ResolutionState:
    """Made for one resolution and thrown away with it."""

    def __init__(
        self,
        merged: MergedRequest,
        catalog: Catalog,
        base: Sequence[type[Feature[Any]]],
        has_variant: HasVariant,
        runs: HasVariant,
    ) -> None:
        self.merged = merged
        self.catalog = catalog
        self.base = {feature.spec.name: feature for feature in base}
        self.models = {**catalog.models, **{name: feature.Args for name, feature in self.base.items()}}
        self.specs = {**catalog.specs, **{name: feature.spec for name, feature in self.base.items()}}
        self.has_variant, self.runs = has_variant, runs
        self.world = self._given = merged.as_world()
        self.active: dict[str, Reason] = {}
        self.args: dict[str, FeatureArgs] = {}
        self.rows: list[PlanNote] = list(merged.notes)
        self.problems: list[Problem] = list(merged.problems)
        self.arguments = Arguments(merged.settings)
        self.holders: dict[str, list[str]] = {}
        self.decided: set[tuple[str, str]] = set()
        self._by_kind: dict[type[Any], list[tuple[str, Any]]] = defaultdict(list)

    def known(self, name: str, source: str) -> bool:
        """Return whether a feature can be used, and report why not. ``source`` names the source or feature that wants it."""
        if name in self.catalog.usable:
            return True
        if name in self.catalog.broken:
            problem = self.catalog.broken[name].problem
            if problem is not None and problem not in self.problems:
                self.problems.append(problem)
            return False
        near = self.catalog.near(name)
        fix = suggestion(near, "mindspeed features list shows every name")
        if not any(problem.code == "MS201" and problem.features == (name,) for problem in self.problems):
            self.problems.append(Problem("MS201", f"there is no feature {name!r}", (name,), where=source, fix=advice(fix)))
        return False

    def args_of(self, name: str) -> FeatureArgs | None:
        """The validated arguments of a feature, or None after their problems were reported."""
        if name in self.args:
            return self.args[name]
        args = self.arguments.validate(name, self.models[name])
        if isinstance(args, FeatureArgs):
            self.args[name] = args
            return args
        self.problems += [problem for problem in args if problem not in self.problems]
        return None

    def holders_known(self, slot: str) -> list[str]:
        """The usable features that could hold a slot, in name order."""
        return [name for name in self.catalog.usable if slot in self.specs[name].slots]

    def give(self, name: str, settings: Mapping[str, Any], source: str) -> None:
        """Settings that a choice brings along for a feature that it makes active; what the user gave stays."""
        given = self.merged.settings.setdefault(name, {})
        for key, value in settings.items():
            given.setdefault(key, Value(value, source))
        self.args.pop(name, None)

    def require_settings(self, name: str, constraint: Requires) -> None:
        """Give a required feature the values that the requirement names, or report who gives another one."""
        needed = constraint.name
        for key, value in constraint.settings.items():
            given = self.merged.settings.get(needed, {}).get(key)
            if given is None or (given.value != value and given.source == MEGATRON_DEFAULTS):
                old = () if given is None else (f"{given.source}: {given.value}",)
                self.merged.settings.setdefault(needed, {})[key] = Value(value, f"required by {name}", old, required_by=name)
                self.args.pop(needed, None)
            elif given.value != value:
                text = f"{name} requires {needed}.{key}={value}{because(constraint.reason)}"
                text = f"{text}, and it is {given.value} ({given.source})"
                other = given.required_by
                fix: Fix = (GiveSetting(f"{needed}.{key}", value), RemoveFeature(name))
                if other:
                    fix = (RemoveFeature(name), RemoveFeature(other))
                self.problem("MS212", text, (name, other or needed), fix, (f"{needed}.{key}",))

    def freeze(self) -> None:
        """Index the active features and those of every plan by what they hold and declare; called once, after propagation."""
        for name in sorted({*self.active, *self.base}):
            spec = self.specs[name]
            for slot in self.slots(name):
                self.holders.setdefault(slot, []).append(name)
            for constraint in spec.constraints:
                self._by_kind[type(constraint)].append((name, constraint))

    def complete_world(self) -> None:
        """Add what settings of active features say of the job: values that nobody gave, and the layers of each chunk."""
        describing = sorted(self.catalog.describing.intersection(self.active))
        asked = ((self.catalog.feature(name), self.args_of(name)) for name in describing)
        self.world = self._given
        self.world = completed(self._given, [(feature, args) for feature, args in asked if args is not None])

    def constraints(self, *kinds: type[Any]) -> Iterator[tuple[str, Any]]:
        """Constraints of these kinds over the active features, in name order, whose ``when`` holds."""
        for kind in kinds:
            for name, constraint in self._by_kind[kind]:
                if kind is Condition or constraint.when is None or self.holds(name, constraint):
                    yield name, constraint

    def holds(self, name: str, constraint: Constraint) -> bool:
        """Return whether the ``when`` of a constraint holds; an unknown value is reported and counts as no."""
        return constraint.when is None or self._decide(name, constraint.when, constraint)

    def slots(self, name: str) -> frozenset[str] | set[str]:
        """The slots that a feature holds with its arguments."""
        spec = self.specs[name]
        if spec.slots and name in self.catalog.usable and (args := self.args_of(name)) is not None:
            held = answer(self.catalog.feature(name), "held_slots", args, self.world)
            if held is not None:
                return frozenset(held)
        return spec.slots if spec.slots_when is None or self._decide(name, spec.slots_when, spec) else frozenset()

    def _decide(self, name: str, when: Predicate, declared: Constraint | FeatureSpec) -> bool:
        args = self.args_of(name)
        if args is None:
            return False
        try:
            return bool(when(args, self.world))
        except UnknownValue as unknown:
            parts = (getattr(declared, field, "") for field in ("slots", "name", "names", "slot", "message"))
            target = next(filter(None, parts))
            what = target if isinstance(target, str) else ", ".join(target)
            self.not_checked(name, unknown, f"{type(declared).__name__} {what}")
            return False
        except Exception as error:  # a plugin's predicate may fail in any way; the message must name the plugin
            self.failed_itself("a condition", name, error)
            return False

    def faulty_condition(self, name: str, condition: Condition, error: ConditionError) -> None:
        """Report a condition whose function fails, as a problem of the package that declares it."""
        row = self.catalog.usable.get(name)
        author, version = (row.distribution, row.version) if row else (BUILT_IN, __version__)
        text = f"the condition {condition.name} of {name} {error}"
        where = f"{author} {version}, {condition.where}"
        fix = Advice(f"report it to the authors of {author}")
        self.problems.append(Problem("MS107", text, (name,), self.chain(name), where, fix))

    def failed_itself(self, what: str, name: str, error: Exception) -> None:
        text = f"{what} of {name} failed itself: {type(error).__name__}: {error}"
        author = self.catalog.usable[name].distribution if name in self.catalog.usable else "mindspeed"
        self.problem("MS901", text, (name,), Advice(f"report it to the authors of {author}"))

    def problem(self, code: str, message: str, names: tuple[str, ...], fix: Fix | FixStep, about: Iterable[str] = ()) -> None:
        """Report a problem of features; ``about`` names further values at fault than those that the fix gives."""
        chain = self.chain(*names)
        where = "; ".join(self.catalog.usable[name].where for name in names if name in self.catalog.usable)
        problem = Problem(code, message, names, chain, where, fix)
        problem = replace(problem, facts=tuple(self.facts(*about, *named_in(problem.fix))))
        if problem not in self.problems:
            self.problems.append(problem)

    def facts(self, *names: str) -> Iterator[GivenValue]:
        """Yield those of these fields of the job and settings (``feature.name``) that a source gives."""
        for name in dict.fromkeys(names):
            feature, _, setting = name.rpartition(".")
            value = self.merged.settings.get(feature, {}).get(setting) if feature else self.merged.world.get(name)
            if value is not None:
                yield GivenValue(name, value.value, value.source, value.option)

    def why(self, name: str) -> tuple[Reason, ...]:
        """The chain of reasons from ``name`` back to the request."""
        reasons = []
        while name:
            reasons.append(self.active[name])
            name = reasons[-1].by
        return tuple(reasons)

    def chain(self, *names: str) -> tuple[str, ...]:
        """The lines that explain why those of these features are there that are active."""
        return tuple(reason.line for name in names if name in self.active for reason in self.why(name))

    def not_checked(self, name: str, unknown: UnknownValue, what: str) -> None:
        """A row, or under strict a problem, for a check that needs a value nobody gave."""
        option = flag(unknown.field)
        if self.merged.strict:
            text = f"{name}: {unknown.field} is not known, so this is not checked: {what!r}"
            self.problem("MS307", text, (name,), GiveField(unknown.field))
        else:
            row = PlanNote("not-checked", name, f"{what!r} depends on {unknown.field}; give {option}")
            self.rows += [row] if row not in self.rows else []

    def root(self, name: str) -> str:
        """The feature of the request that brought ``name`` in."""
        while self.active[name].by:
            name = self.active[name].by
        return name
