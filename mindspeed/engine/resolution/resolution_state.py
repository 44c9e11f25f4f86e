"""The state that the phases of one resolution share: what is active and why, arguments, problems found so far."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, Literal, Protocol

from mindspeed._version import __version__
from mindspeed.engine.resolution.jobs import Jobs, JobSet, NotUniform, OneJob, by_contribution
from mindspeed.engine.resolution.planned_feature import PlanNote, Reason, ReasonKind, Value
from mindspeed.engine.resolution.request import MEGATRON_DEFAULTS
from mindspeed.engine.resolution.request_merge import MergedRequest
from mindspeed.engine.resolution.setting_validation import Arguments, flag
from mindspeed.job.hybrid_pattern import facts_of_pattern
from mindspeed.job.world import FIELDS, PARALLEL_SIZES, UnknownValue, World
from mindspeed.plugins.answers import (
    LAYER_SPLIT,
    Contribution,
    answer,
    contradictions,
    contribution,
    implements,
    split_layers,
    with_contribution,
)
from mindspeed.plugins.conditions import Condition, ConditionError, Predicate, is_met
from mindspeed.plugins.constraints import Relation, Requires
from mindspeed.plugins.discovery import BUILT_IN, Catalog
from mindspeed.plugins.feature import Feature, FeatureArgs
from mindspeed.problems import Fix, Fixes, GivenValue, Problem, Text, advice, named_in, renames


def possible_fix(steps: Fixes, world: World) -> Fixes:
    """Remove the alternatives that give a field another value than the pattern of a hybrid model."""
    if not steps or not world.is_hybrid:
        return steps
    facts = facts_of_pattern(world.hybrid_layer_pattern, world.pp)
    possible = tuple(step for step in steps if not _contradicts(step, facts))
    return possible or (Fix.advise("change the pattern"),)


def _contradicts(step: Fix, facts: Mapping[str, Any]) -> bool:
    if step.verb == "give-field":
        return step.name in facts and facts[step.name] != step.value
    return any(_contradicts(part, facts) for part in step.steps)


HasVariant = Callable[[str, str], bool]
"""``(op, platform) -> bool``: whether an operator has more than its reference there."""


class MeasuredSpeed(Protocol):
    """The speed of an operator on this machine in one data type, compared with what a job runs without it."""

    @property
    def dtype(self) -> str: ...
    @property
    def loses(self) -> bool: ...
    @property
    def comparison(self) -> str: ...


Measurements = Callable[[str], Sequence[MeasuredSpeed]]
"""``op -> measurements``, one for each data type in which the operator was measured here."""


def nothing_measured(op: str) -> tuple[MeasuredSpeed, ...]:
    """Return no measurement."""
    return ()


ONE_JOB: Final = OneJob()

Suggestions = Literal["none", "declared", "also removals"]
"""Fixes that problems of features get: the declared ones, and with them the removal of each feature at fault."""


def because(reason: str) -> Text:
    """The reason of a constraint as the end of a sentence; empty without one."""
    return Text.of(", because {reason}", reason=Text.plain(reason)) if reason else Text.plain("")


def plain_torch_only(operators: Iterable[str], platform: str) -> Text:
    """Return that operators have no variant on a platform."""
    return Text.of(
        "{operators} has only a plain-torch reference on {platform}", operators=", ".join(operators), platform=platform
    )


class ResolutionState:
    """Made for one resolution and thrown away with it.

    ``where`` has the jobs in which each active feature is active, ``refused`` those with a problem; of several jobs together
    only these are kept, no rows and no problems.
    """

    def __init__(
        self,
        merged: MergedRequest,
        catalog: Catalog,
        base: Sequence[type[Feature[Any]]],
        has_variant: HasVariant,
        runs: HasVariant,
        jobs: Jobs = ONE_JOB,
        scope: JobSet = 1,
        suggestions: Suggestions = "declared",
        measurements: Measurements = nothing_measured,
    ) -> None:
        self.merged = merged
        self.catalog = catalog
        self.base = {feature.spec.name: feature for feature in base}
        self.models = {**catalog.models, **{name: feature.Args for name, feature in self.base.items()}}
        self.specs = {**catalog.specs, **{name: feature.spec for name, feature in self.base.items()}}
        self.has_variant, self.runs, self._measurements = has_variant, runs, measurements
        self.jobs, self.scope, self.is_single = jobs, scope, jobs.is_single
        self.suggestions = suggestions
        self.world = self._given = merged.as_world()
        self._fixed = frozenset(name for name, value in merged.world.items() if value.source != MEGATRON_DEFAULTS)
        settable = (name for name in self._fixed if FIELDS[name].has_default and name not in PARALLEL_SIZES)
        self._said = frozenset(name for name in settable if not merged.world[name].option)
        self.active: dict[str, Reason] = {}
        self.where: dict[str, JobSet] = {}
        self.by_level_one: dict[str, JobSet] = {}
        self.excluded_by: dict[str, str] = {}
        self.refused: JobSet = scope if merged.problems else 0
        self.args: dict[str, FeatureArgs] = {}
        self._sized: dict[tuple[str, Contribution], FeatureArgs] = {}
        self.rows: list[PlanNote] = list(merged.notes)
        self.problems: list[Problem] = list(merged.problems)
        self.arguments = Arguments(merged.settings)
        self.holders: dict[str, dict[str, JobSet]] = {}
        self.decided: set[tuple[str, str]] = set()
        self._contributions: list[tuple[Contribution, JobSet]] = [((), scope)]
        self.declared: dict[type[Any], list[tuple[str, Any]]] = defaultdict(list)
        """Every constraint of the active features, and of those of every plan, by kind and in name order; after `freeze`."""
        self.names: Sequence[str] = ()
        """Names of these features in order; after `freeze`."""

    def measured(self, name: str) -> list[MeasuredSpeed]:
        """Return the measurements of a feature's operators in the data type of the job; all where that has none."""
        every = [one for op in self.specs[name].ops for one in self._measurements(op)]
        return [one for one in every if self.world.knows("dtype") and self.world.dtype == one.dtype] or every

    def slower_operators(self, name: str) -> str:
        """Return which operators of a feature lose to torch here, or ''; they count in every type where `measured` has them."""
        every = self.measured(name)
        lost = [one for one in every if one.loses]
        slower = "; ".join(one.comparison for one in lost)
        if {one.dtype for one in lost} == {one.dtype for one in every} or not lost:
            return slower
        if self.world.knows("dtype"):
            return Text.of("{slower}; it was not measured in {dtype}", slower=slower, dtype=self.world.dtype)
        return Text.of("{slower}; it depends on {option}, which is not set", slower=slower, option=flag("dtype"))

    # what is active

    def activate(self, name: str, why: Reason, jobs: JobSet) -> JobSet:
        """Make a feature active in these jobs; return those in which it was not."""
        before = self.where.get(name, 0)
        if new := jobs & ~before:
            self.where[name] = before | new
            self.active.setdefault(name, why)
        return new

    def remove(self, name: str, jobs: JobSet) -> None:
        """Take a feature out of these jobs."""
        self.where[name] &= ~jobs
        if not self.where[name]:
            del self.active[name], self.where[name]

    def known(self, name: str, source: str) -> bool:
        """Return whether a feature can be used, and report why not. ``source`` names the source or feature that wants it."""
        if name in self.catalog.usable:
            return True
        if name in self.catalog.broken:
            if (problem := self.catalog.broken[name].problem) is not None:
                self.report(problem, self.scope)
            return False
        fix = renames(name, self.catalog.near(name)) or advice("mindspeed features list shows every name")
        if not any(problem.code == "MS201" and problem.features == (name,) for problem in self.problems):
            self.report(
                Problem("MS201", Text.of("the feature {name!r} does not exist", name=name), (name,), where=source, fix=fix),
                self.scope,
            )
        return False

    # settings

    def args_of(self, name: str) -> FeatureArgs | None:
        """The validated arguments of a feature, or None after their problems were reported."""
        if name in self.args:
            return self.args[name]
        args = self.arguments.validate(name, self.models[name])
        if isinstance(args, FeatureArgs):
            self.args[name] = args
            return args
        for problem in args:
            self.report(problem, self.where.get(name, self.scope))
        return None

    def args_in(self, name: str, args: FeatureArgs, world: World) -> FeatureArgs:
        """The arguments of a feature in one of several jobs: parallel sizes are settings too."""
        sizes = self.specs[name].sizes
        if self.is_single or not sizes:
            return args
        given = tuple((setting, getattr(world, size)) for size, setting in sizes.items() if setting)
        if (name, given) not in self._sized:
            self._sized[name, given] = args.model_copy(update=dict(given))
        return self._sized[name, given]

    def holders_known(self, slot: str) -> list[str]:
        """The usable features that could hold a slot, in name order."""
        return [name for name in self.catalog.usable if slot in self.specs[name].slots]

    def give(self, name: str, settings: Mapping[str, Any], source: str) -> None:
        """Settings that a choice gives to the feature that it makes active; values of the user are kept."""
        given = self.merged.settings.setdefault(name, {})
        for key, value in settings.items():
            given.setdefault(key, Value(value, source))
        self.args.pop(name, None)

    def require_settings(self, name: str, constraint: Requires, jobs: JobSet) -> None:
        """Give a required feature the values that the requirement names, or report who gives another one.

        Raises NotUniform where only some jobs have the requirement.
        """
        needed = constraint.name
        if jobs != self.scope:
            raise NotUniform(jobs)
        for key, value in constraint.settings.items():
            given = self.merged.settings.get(needed, {}).get(key)
            if given is None or (given.value != value and given.source == MEGATRON_DEFAULTS):
                old = () if given is None else (f"{given.source}: {given.value}",)
                self.merged.settings.setdefault(needed, {})[key] = Value(value, f"required by {name}", old, required_by=name)
                self.args.pop(needed, None)
            elif given.value != value:
                text = Text.of(
                    "{name} requires {setting}={value}{because}, but it is {given} ({source})",
                    name=name,
                    setting=f"{needed}.{key}",
                    value=value,
                    because=because(constraint.reason),
                    given=given.value,
                    source=given.source,
                )
                fix: Fixes = (Fix.give_setting(f"{needed}.{key}", value), Fix.remove_feature(name))
                if other := given.required_by:
                    fix = (Fix.remove_feature(name), Fix.remove_feature(other))
                self.problem("MS212", text, (name, other or needed), fix, jobs, (f"{needed}.{key}",))

    # questions about the job

    def values(self, key: Hashable, function: Callable[[World], Any]) -> Iterable[tuple[Any, JobSet]]:
        """Ask a function of the job: each of its values, and the jobs that have it. Equal keys mean equal functions."""
        if self.is_single:
            return ((function(self.world), self.scope),)
        found: dict[Any, JobSet] = {}
        for added, part in self._contributions:
            for value, jobs in self.jobs.values(key, self._given, added, function).items():
                if here := jobs & part:
                    found[value] = found.get(value, 0) | here
        return found.items()

    def key_of(self, name: str, *further: Hashable) -> Hashable:
        """A key for a question about a feature with its settings."""
        settings = self.merged.settings.get(name)
        given = tuple(sorted((key, repr(value.value)) for key, value in settings.items())) if settings else ()
        return (name, given, *further)

    def is_due_to_features(self, name: str, condition: Condition) -> bool:
        """Return whether a condition that fails would hold without what other active features make of the job."""
        args = self.args_of(name)
        try:
            return not condition.of and is_met(condition, args, self._given)
        except (UnknownValue, ConditionError):
            return False

    def add_base_values(self) -> None:
        """Add fields of the job that settings of the base plan decide."""
        for name, feature in self.base.items():
            if implements(feature, "job_values") and (args := self.args_of(name)) is not None:
                self.world = self._given = with_contribution(self._given, contribution(self._given, feature, args, self._fixed))

    def withdraw(self, flag: str) -> None:
        """Remove what Megatron's default gives for a flag, and for the other flags of the same argument."""
        argument = FIELDS[flag].arguments[:1]
        same = [name for name, field in FIELDS.items() if field.kind is bool and field.arguments[:1] == argument]
        changed = {name: False for name in same if name not in self._fixed and self._given.is_set(name)}
        self.world = self._given = World(self._given.known() | changed)

    def complete_world(self) -> None:
        """Add what active features give to the job: values that are not set, arguments that they set, then layers per chunk."""
        self.world, self._contributions = self._given, [((), self.scope)]
        describing = sorted(self.catalog.describing.intersection(self.active))
        self._add_answers(describing, "contribution", partial(contribution, given=self._fixed))
        splitting = [name for name in describing if implements(self.catalog.feature(name), LAYER_SPLIT)]
        self._add_answers(splitting, LAYER_SPLIT, split_layers)

    def _add_answers(self, names: Iterable[str], what: str, question: Callable[..., Contribution]) -> None:
        """Add what features answer about the job as it is so far; none of them sees the answer of another."""
        parts = self._contributions
        for name in names:
            if (args := self.args_of(name)) is None:
                continue
            feature = self.catalog.feature(name)

            def answered(world: World, name: str = name, args: Any = args, feature: Any = feature) -> Contribution:
                return question(world, feature, self.args_in(name, args, world))

            key = None if self.is_single else self.key_of(name, what)
            given = tuple(self.values(key, answered))
            parts = [
                ((*before, *more), here)
                for before, part in parts
                for more, jobs in by_contribution(given, self.where[name], self.scope)
                if (here := part & jobs)
            ]
        self._contributions = parts
        if self.is_single:
            self.world = with_contribution(self._given, parts[0][0])

    def contradictions(self, name: str) -> Iterable[tuple[Contribution, JobSet]]:
        """Return the fields that the user gives and that an active feature sets to other values, and the jobs of each set.

        What an argument of Megatron-LM gives is compared with the arguments of the plan.
        """
        if not self._said or (args := self.args_of(name)) is None:
            return ()
        feature = self.catalog.feature(name)

        def contradicted(world: World) -> Contribution:
            return contradictions(world, feature, self.args_in(name, args, world), self._said)

        return self.values(None if self.is_single else self.key_of(name, "contradictions"), contradicted)

    def holds(self, name: str, constraint: Relation) -> JobSet:
        """Return the jobs in which the ``when`` of a constraint holds; an unknown value is reported and counts as no."""
        if constraint.when is None:
            return self.scope
        parts = (getattr(constraint, field, "") for field in ("name", "names", "slot", "function"))
        target = next(filter(None, parts))
        what = target if isinstance(target, str) else ", ".join(target)
        return self._decide(name, constraint.when, f"{type(constraint).__name__} {what}")

    def _decide(self, name: str, when: Predicate, what: str) -> JobSet:
        args = self.args_of(name)
        if args is None:
            return 0

        def decided(world: World) -> Any:
            try:
                return bool(when(self.args_in(name, args, world), world))
            except UnknownValue as unknown:
                return unknown.fields
            except Exception as error:  # a plugin's predicate may fail in any way; the message must name the plugin
                return f"{type(error).__name__}: {error}"

        held: JobSet = 0
        for value, jobs in self.values(None if self.is_single else self.key_of(name, id(when)), decided):
            if value is True:
                held = jobs
            elif isinstance(value, tuple):
                self.not_checked(name, value[0], what, jobs & self.where.get(name, self.scope))
            elif isinstance(value, str):
                self.failed_itself("a condition", name, value, jobs & self.where.get(name, self.scope))
        return held

    def held_slots(self, name: str) -> Mapping[str, JobSet]:
        """The slots that a feature holds with its arguments, and in which jobs."""
        spec = self.specs[name]
        if not spec.slots:
            return {}
        if name not in self.catalog.usable or (args := self.args_of(name)) is None:
            return dict.fromkeys(spec.slots, self.scope)
        feature = self.catalog.feature(name)

        def held(world: World) -> frozenset[str]:
            given = answer(feature, "held_slots", self.args_in(name, args, world), world)
            return frozenset(spec.slots if given is None else given)

        found: dict[str, JobSet] = {}
        for slots, jobs in self.values(None if self.is_single else self.key_of(name, "slots"), held):
            for slot in slots:
                found[slot] = found.get(slot, 0) | jobs
        return found

    def freeze(self) -> None:
        """Index the active features and those of every plan by what they hold and declare; called once, after propagation."""
        self.names = sorted({*self.active, *self.base})
        for name in self.names:
            spec = self.specs[name]
            for slot, jobs in self.held_slots(name).items() if spec.slots else ():
                if here := jobs & self.where.get(name, self.scope):
                    self.holders.setdefault(slot, {})[name] = here
            for constraint in spec.constraints:
                self.declared[type(constraint)].append((name, constraint))

    def constraints(self, *kinds: type[Any]) -> Iterator[tuple[str, Any, JobSet]]:
        """Constraints of these kinds over the active features, in name order, with the jobs in which they count."""
        for kind in kinds:
            for name, constraint in self.declared[kind]:
                active = self.where.get(name, self.scope)
                if jobs := active if constraint.when is None else active & self.holds(name, constraint):
                    yield name, constraint, jobs

    # what is reported

    def faulty_condition(self, name: str, condition: Condition, error: ConditionError, jobs: JobSet) -> None:
        """Report a condition whose function fails, as a problem of the package that declares it."""
        row = self.catalog.usable.get(name)
        author, version = (row.distribution, row.version) if row else (BUILT_IN, __version__)
        text = f"the condition {condition.name} of {name} {error}"
        where = f"{author} {version}, {condition.where}"
        fix = Fix.advise(f"report it to the authors of {author}")
        self.report(Problem("MS107", text, (name,), self.chain(name), where, fix), jobs)

    def failed_itself(self, what: str, name: str, error: str, jobs: JobSet) -> None:
        text = f"{what} of {name} raised an error: {error}"
        author = self.catalog.usable[name].distribution if name in self.catalog.usable else "mindspeed"
        self.problem("MS901", text, (name,), Fix.advise(f"report it to the authors of {author}"), jobs)

    def problem(
        self,
        code: str,
        message: str,
        names: tuple[str, ...],
        fix: Fixes | Fix,
        jobs: JobSet,
        about: Iterable[str] = (),
        rule: str = "",
    ) -> None:
        """Report a problem of features, with the reasons why each is active, in these jobs.

        ``about`` names further values at fault than those that the fix gives, ``rule`` the condition that does not hold.
        """
        self.refused |= jobs
        if self.is_single:
            where = "; ".join(self.catalog.usable[name].described for name in names if name in self.catalog.usable)
            steps = fix if isinstance(fix, tuple) else (fix,)
            facts = self.facts(*about, *named_in(steps))
            further = tuple(map(Fix.remove_feature, names)) if self.suggestions == "also removals" else ()
            possible = () if self.suggestions == "none" else self.possible((*steps, *further))
            self.report(Problem(code, message, names, self.chain(*names), where, possible, facts, rule), jobs)

    def facts(self, *names: str) -> Iterator[GivenValue]:
        """Yield those of these fields of the job and settings (``feature.name``) that a source gives."""
        for name in dict.fromkeys(names):
            feature, _, setting = name.rpartition(".")
            value = self.merged.settings.get(feature, {}).get(setting) if feature else self.merged.world.get(name)
            if value is not None:
                yield GivenValue(name, value.value, value.source, value.option)

    def report(self, problem: Problem, jobs: JobSet) -> None:
        """Refuse these jobs, for a problem that is listed once."""
        self.refused |= jobs
        if self.is_single and problem not in self.problems:
            self.problems.append(problem)

    def note(self, kind: str, name: str, text: str) -> None:
        """Add a row of the plan."""
        if self.is_single:
            self.rows.append(PlanNote(kind, name, text))

    def why(self, name: str) -> tuple[Reason, ...]:
        """The chain of reasons from ``name`` back to the request."""
        reasons = []
        while name:
            reasons.append(self.active[name])
            name = reasons[-1].by
        return tuple(reasons)

    def chain(self, *names: str) -> tuple[str, ...]:
        """The lines that explain why the active ones of these features are active."""
        return tuple(reason.line for name in names if name in self.active for reason in self.why(name))

    def not_checked(self, name: str, field: str, what: str, jobs: JobSet) -> None:
        """Add a row, or under strict a problem, for a check that needs a value that is not set."""
        if self.merged.strict:
            text = Text.of("{name}: {field} is not set, so this cannot be checked: '{what}'", name=name, field=field, what=what)
            self.problem("MS307", text, (name,), Fix.give_field(field), jobs)
        else:
            text = Text.of("'{what}' depends on {field}", what=what, field=field)
            row = PlanNote("not-checked", name, text, (field,))
            self.rows += [row] if self.is_single and row not in self.rows else []

    def possible(self, fixes: Fixes) -> Fixes:
        """Remove alternatives that change nothing, and let those that remove a feature remove what requests it."""
        steps = tuple(dict.fromkeys(map(self._possible, possible_fix(fixes, self.world))))
        return tuple(fix for fix in steps if not self._is_given(fix)) or steps

    def _possible(self, fix: Fix) -> Fix:
        if fix.verb == "remove-feature" and fix.name in self.active:
            return self.removal(fix.name)
        if fix.steps:
            return Fix.together(map(self._possible, fix.steps))
        if fix.verb == "give-field" and fix.value is not None:
            return self._in_its_spelling(fix)
        return fix

    def _is_given(self, fix: Fix) -> bool:
        """Return whether a source of the request gives this value already."""
        feature, _, setting = fix.name.rpartition(".")
        values = self.merged.settings.get(feature, {}) if feature else self.merged.world
        given = values.get(setting) if fix.verb in ("give-field", "give-setting") and fix.value is not None else None
        return given is not None and given.value == fix.value

    def _in_its_spelling(self, fix: Fix) -> Fix:
        """Return the fix as the setting of a parallel size, where that gives it."""
        owner, setting = self.catalog.owners.get(fix.name, ("", None))
        if setting is None or (owner, setting) not in self.merged.spelled_as_settings:
            return fix
        return replace(fix, verb="give-setting", name=f"{owner}.{setting}")

    def removal(self, name: str) -> Fix:
        """Return the fix that takes a feature out: it removes what the request has for it."""
        steps = tuple(dict.fromkeys(step for root in self._roots_of(name) for step in self._ways_to_remove(root)))
        return Fix.together(steps) if len(steps) > 1 else steps[0] if steps else Fix.remove_feature(name)

    def _roots_of(self, name: str) -> list[str]:
        """Return the active features that the request itself brings in, and that bring in ``name``."""
        bringing: dict[str, list[str]] = defaultdict(list)
        for other, reason in self.active.items():
            if reason.kind in (ReasonKind.NAMED, ReasonKind.CHOSEN):
                bringing[other].append(reason.by)
            for need in self.catalog.requires.get(other, ()):
                if need.name in self.active and self.holds(other, need):
                    bringing[need.name].append(other)
        found = [name]
        for one in found:
            found += [other for other in dict.fromkeys(bringing[one]) if other not in found]
        return [one for one in found if self._is_root(one)]

    def _is_root(self, name: str) -> bool:
        return not self.active[name].by or name in self.merged.requested or self._size_of(name) is not None

    def _size_of(self, name: str) -> str | None:
        """Return the parallel size greater than 1 that brings in a feature; None without one."""
        sizes = (size for size, (owner, _) in self.catalog.owners.items() if owner == name and size in PARALLEL_SIZES)
        return next((size for size in sizes if getattr(self.world, size) > 1), None)

    def _ways_to_remove(self, name: str) -> Iterator[Fix]:
        """Yield the changes after which the request itself does not bring in a feature."""
        if name in self.merged.requested:
            yield Fix.remove_feature(name)
        if (size := self._size_of(name)) is not None:
            yield self._in_its_spelling(Fix.give_field(size, 1))
        flag = self.catalog.following.get(name)
        if flag is not None and self.world.is_set(flag):
            yield Fix.give_field(flag, False)
        if self.active[name].kind is ReasonKind.LEVEL_ONE:
            yield Fix.give_option("--without", name)
