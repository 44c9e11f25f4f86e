"""Effects of a plan: check that what it declares really happens in this process.

A feature acts at *points*: patched sites, hooks, Megatron arguments, operators. A point is *effective* when what the
plan put there is still there, and *reached* when it was called or read. Each point belongs to a phase; calls are counted
from activation until that phase has ended once, and from then on nothing of the counting is left.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final

from mindspeed.engine.planning.plan import ActivationPlan, PlannedPatch
from mindspeed.engine.runtime.call_count import CallCount
from mindspeed.plugins.feature import Feature
from mindspeed.plugins.hookspecs import HOOKS
from mindspeed.plugins.manager import FeatureManager
from mindspeed.plugins.patches import Mixin, Phase, Replace
from mindspeed.problems import Fix, MindSpeedError, Problem, advice
from mindspeed.process.run import PLAN, REPORT_VARIABLE

if TYPE_CHECKING:
    from mindspeed.engine.patching.apply import AppliedPatches


_PATIENCE: Final = 30.0
"""Seconds that rank 0 waits for another rank to end its first step."""


@dataclass(frozen=True, slots=True)
class Effect:
    """The present state of a place where a feature acts.

    ``kind`` is patch, hook, argument, op or algorithm; ``calls`` is None where calls cannot be counted (a plain value).
    ``state`` is ``reached``, ``never reached``, ``other path`` (optional, and another point was reached), ``not yet due``,
    ``not counted``, ``not effective``, ``reached on rank N`` for what only another rank has, or ``not known`` when that
    rank did not say.
    """

    kind: str
    name: str
    phase: Phase
    effective: bool
    calls: int | None
    state: str

    @property
    def reached(self) -> bool:
        """Return whether a rank has called or read what the feature put here."""
        return self.state.startswith("reached")


@dataclass(frozen=True, slots=True)
class FeatureProof:
    """The points of one feature. ``own_trainer`` is that field of its declaration."""

    name: str
    stability: str
    points: tuple[Effect, ...]
    own_trainer: str = ""

    def __str__(self) -> str:
        """``ring-attention: 3 sites, 3 effective, 3 reached (24 calls)``."""
        return f"{self.name}: {_tally(self.points, with_calls=True)}"


@dataclass(frozen=True, slots=True)
class EffectReport:
    """Effects of the active plan so far. ``problems`` are warnings, and errors under strict."""

    digest: str
    features: tuple[FeatureProof, ...]
    problems: tuple[Problem, ...]
    ended: tuple[Phase, ...] = ()

    def summary(self) -> str:
        """Format a line for a log."""
        points = [point for feature in self.features for point in feature.points]
        stale = _count(sum(problem.code == "MS404" for problem in self.problems), "stale reference")
        active = _count(len(self.features), "feature")
        return f"mindspeed: {active} active, {_tally(points)}, {stale}; plan {self.digest}"

    def to_json(self) -> dict[str, Any]:
        return {
            "digest": self.digest,
            "ended": list(self.ended),
            "features": [asdict(feature) | {"summary": str(feature)} for feature in self.features],
            "problems": [problem.to_json() for problem in self.problems],
        }


@dataclass(slots=True)
class _Watched:
    """A point that is being proven; ``elsewhere`` is its state where this rank does not reach it."""

    feature: str
    kind: str
    name: str
    phase: Phase
    optional: bool = False
    counts: list[CallCount] = field(default_factory=list)
    elsewhere: str = "never reached"


FunctionsOf = Callable[[str], Sequence[FunctionType]]
"""The functions whose calls show that an operator or an algorithm runs, by its name."""


class EffectTracker:
    """Watches one active plan.

    `enter` tells which phase of the run begins. Rank 0 writes the report to ``path`` and passes its summary and warnings to
    ``say``, line by line; None says nothing. ``taken`` records which Megatron object took an override, and the value that the
    script had there: ``{"tensor_model_parallel_size": {"TransformerConfig": 1, "initialize_model_parallel": 1}}``.
    """

    applied: AppliedPatches | None = None
    """The patches that are in force; set when all loaded modules are patched."""

    def __init__(self, plan: ActivationPlan, manager: FeatureManager, operator_functions: FunctionsOf | None = None) -> None:
        self.plan = plan
        self._functions: dict[str, FunctionsOf] = {"algorithm": functions_of_modules}
        self._functions |= {"op": operator_functions} if operator_functions is not None else {}
        self.path: str | Path | None = os.environ.get(REPORT_VARIABLE)
        self.say: Callable[[str], None] | None = _to_stderr
        self._manager = manager
        self.taken: dict[str, dict[str, Any]] = {}
        self.reported: dict[Problem, bool] = {}  # whether it was printed
        self._running: Phase | None = "setup"
        self._ended: dict[Phase, None] = {}
        self._stale: list[Problem] | None = None
        self._counts: dict[FunctionType, CallCount] = {}
        self.functions: dict[FunctionType, str] = {}
        self._finished = False
        self._features = [feature for feature in manager.features if feature.spec.name in plan.names]
        self._watched = tuple(self._points())

    def bound(self, planned: PlannedPatch, made: Any) -> None:
        """A patch was bound: count the calls of what was made for it, unless its phase is over."""
        functions = _functions_of(planned, made)
        if planned.owner in self.plan.names:
            self.functions.update(dict.fromkeys(functions, planned.owner))
        for watched in self._watched:
            if (watched.kind, watched.feature, watched.name) == ("patch", planned.owner, planned.site):
                self._count(watched, functions)

    def enter(self, phase: Phase | None) -> None:
        """A phase of the run begins, or a step begins again; what ran before ends. None is the time between phases.

        When the first step has ended the report is made, with a warning for what was never reached. Raises MindSpeedError
        with it under a strict plan.
        """
        before, self._running = self._running, phase
        if phase == "step" and before != "step":
            self._count_code()
        if before is None or before in self._ended or (before == phase and before != "step"):
            return
        if before == "step":
            self._ask_other_ranks()
        self._ended[before] = None
        self._stop_counts()
        if before == "step":
            self._judge(strict=self.plan.strict)

    def finish(self) -> None:
        """The run is over: stop all counting, so that every function is as it was, and write the last report."""
        if self._finished:
            return
        self._finished = True
        self._stop_counts()
        if self._running == "step" and "step" not in self._ended:
            self._ended["step"] = None
            self._judge(strict=False)
        elif self.path:
            self._write(self.report())

    def abandon(self) -> None:
        """The program failed: stop all counting and say nothing, for what it has not reached is no fault of a feature."""
        self._finished = True
        self._stop_counts()

    def report(self) -> EffectReport:
        """Make the report. Walks the heap for stale references, 0.2 s, but only once after the first step."""
        features = tuple(map(self._feature, self._features))
        stale = self._stale
        if stale is None:
            stale = self.applied.audit() if self.applied is not None else []
            self._stale = stale if "step" in self._ended else None
        problems = [*self.reported, *stale]
        for feature in features:
            problems += _problems_of(feature, self._outer_patches(feature.name))
        return EffectReport(self.plan.digest, features, tuple(problems), tuple(self._ended))

    def _outer_patches(self, owner: str) -> dict[str, list[str]]:
        """The other features that patch a site of a feature outside of it, and may not call what they wrap."""
        outer: dict[str, list[str]] = {}
        own: set[str] = set()
        for planned in self.plan.patches:
            if planned.owner == owner and not planned.skipped:
                own.add(planned.site)
            elif planned.site in own and not planned.skipped:
                outer.setdefault(planned.site, []).append(planned.owner)
        return outer

    def effects(self) -> dict[str, dict[str, int]]:
        """Count how often the code of each feature did something so far: its sites and operators that can be counted, its hooks
        but for calls that changed nothing."""
        effects: dict[str, dict[str, int]] = {}
        for watched in self._watched:
            calls = self._manager.effects[watched.feature, watched.name] if watched.kind == "hook" else self._calls(watched)
            if watched.kind != "argument" and calls is not None:
                effects.setdefault(watched.feature, {})[watched.name] = calls
        return effects

    def _points(self) -> Iterator[_Watched]:
        """Every point of every feature, equal on all ranks."""
        for feature in self._features:
            name = feature.spec.name
            sites = {p.site: p.patch for p in self.plan.patches if p.owner == name and not p.skipped}
            for site, patch in sites.items():
                yield _Watched(name, "patch", site, patch.phase, patch.optional)
            for hook, facts in HOOKS.items():
                if facts.proves and facts.phase is not None and name in self._manager.owners(hook):
                    yield _Watched(name, "hook", hook, facts.phase)
            for planned in self.plan.overrides:
                if name in planned.owners:
                    yield _Watched(name, "argument", planned.override.argument, "build", planned.optional)
            for op in feature.spec.ops:
                yield _Watched(name, "op", op, "step")
            if algorithm := feature.spec.verify_with.algorithm:
                yield _Watched(name, "algorithm", ", ".join(algorithm), "step", optional=True)

    def _count_code(self) -> None:
        """Count the functions of the features' operators and algorithms, whose modules are loaded when the model is built."""
        for watched in self._watched:
            if watched.kind in self._functions and not watched.counts:
                self._count(watched, self._functions[watched.kind](watched.name))

    def _count(self, watched: _Watched, functions: Sequence[FunctionType]) -> None:
        if watched.phase in self._ended or self._finished:
            return
        for function in functions:
            if function not in self._counts:
                self._counts[function] = CallCount(function)
            watched.counts.append(self._counts[function])

    def _stop_counts(self) -> None:
        """Stop what is counted for no phase that is yet to end."""
        due = [watched for watched in self._watched if watched.phase not in self._ended and not self._finished]
        needed = {count for watched in due for count in watched.counts}
        for function, count in list(self._counts.items()):
            if count not in needed:
                count.stop()
                del self._counts[function]

    def _calls(self, watched: _Watched) -> int | None:
        """Calls so far, or None where they cannot be counted."""
        if watched.kind == "hook":
            return self._manager.calls[watched.feature, watched.name]
        if watched.kind == "argument":
            return len(self.taken.get(watched.name, ()))
        if watched.kind == "patch" and self._holds(watched.name) is not None and not watched.counts:
            return None
        return sum(count.calls for count in watched.counts)

    def _holds(self, site: str) -> bool | None:
        return self.applied.holds(site) if self.applied is not None else None

    def _feature(self, feature: Feature[Any]) -> FeatureProof:
        name = feature.spec.name
        watched = [watched for watched in self._watched if watched.feature == name]
        points = [self._point(each) for each in watched]
        if any(point.reached and point.kind != "argument" for point in points):
            unused = [each.optional and point.state == "never reached" for each, point in zip(watched, points, strict=True)]
            points = [replace(p, state="other path") if other else p for p, other in zip(points, unused, strict=True)]
        return FeatureProof(name, feature.spec.stability.value, tuple(points), feature.spec.own_trainer)

    def _point(self, watched: _Watched) -> Effect:
        effective = watched.kind != "patch" or self._holds(watched.name) is not False
        calls = self._calls(watched)
        if not effective:
            state = "not effective"
        elif calls is None:
            state = "not counted"
        elif calls:
            state = "reached"
        else:
            state = watched.elsewhere if watched.phase in self._ended else "not yet due"
        return Effect(watched.kind, watched.name, watched.phase, effective, calls, state)

    def _ask_other_ranks(self) -> None:
        """Collect on rank 0 the points that other ranks have reached; they publish theirs in the store."""
        group = _default_group()
        if group is None or self.say is None:
            return
        rank, size, store = group
        key = f"mindspeed/proof/{self.plan.digest}"
        if rank:
            store.set(f"{key}/{rank}", "".join("1" if self._calls(watched) else "0" for watched in self._watched))
            return
        due = ("setup", "build", "step")
        missing = [i for i, watched in enumerate(self._watched) if self._calls(watched) == 0 and watched.phase in due]
        for other in range(1, size) if missing else ():
            try:
                store.wait([f"{key}/{other}"], timedelta(seconds=_PATIENCE))
                reached = store.get(f"{key}/{other}").decode()
            except RuntimeError:  # DistStoreError of torch is one
                reached = None
            for index in missing:
                if reached is None:
                    self._watched[index].elsewhere = f"unknown, because rank {other} did not report"
                elif reached[index] == "1":
                    self._watched[index].elsewhere = f"reached on rank {other}"
            missing = [index for index in missing if reached is not None and reached[index] != "1"]

    def _judge(self, strict: bool) -> None:
        """Say on rank 0 what the first step has shown. Raises MindSpeedError for problems if ``strict``."""
        if _rank() or (self.say is None and not self.path):
            return
        report = self.report()
        self._write(report)
        if report.problems and strict:
            raise MindSpeedError(report.problems)
        self._print(report.summary(), *(str(problem) for problem in report.problems if not self.reported.get(problem)))

    def _write(self, report: EffectReport) -> None:
        if not self.path or _rank():
            return
        path, data = Path(self.path), report.to_json()
        if not path.with_name(PLAN).is_file():  # which the folders of some trainers have
            data["plan"] = self.plan.to_json()
        try:
            path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
        except OSError as error:  # a full disk ends no training that could go on
            self._print(f"mindspeed: the report cannot be written: {error}")

    def _print(self, *lines: str) -> None:
        if self.say is not None:
            for line in lines:
                self.say(line)


def functions_of_modules(names: str) -> list[FunctionType]:
    """Return the functions and methods of modules, but for special methods and those that dataclasses share with all others."""
    found: list[FunctionType] = []
    for name in set(names.split(", ")) & sys.modules.keys():
        own = [value for value in vars(sys.modules[name]).values() if getattr(value, "__module__", "") == name]
        values = [*own, *(value for each in own if isinstance(each, type) for value in vars(each).values())]
        found += [value for value in values if isinstance(value, FunctionType) and value.__module__ == name]
    return [function for function in found if not function.__name__.startswith("__")]


def _functions_of(planned: PlannedPatch, made: Any) -> list[FunctionType]:
    """The functions whose calls show that a patch was reached: itself, or the methods that its class brings."""
    inner = getattr(made, "__func__", made)
    if isinstance(inner, FunctionType):
        return [inner]
    if not isinstance(inner, type) or not isinstance(planned.patch, Replace | Mixin):
        return []
    brought = inner.__bases__[0]
    methods = (getattr(value, "__func__", value) for value in vars(brought).values())
    return [method for method in methods if isinstance(method, FunctionType)]


_KINDS: Final = {"patch": "the patched", "hook": "the hook", "argument": "Megatron's argument", "op": "the operator"}


def _problems_of(feature: FeatureProof, outer: Mapping[str, Sequence[str]]) -> Iterator[Problem]:
    for point in feature.points:
        if point.state == "never reached":
            place = f"{_KINDS.get(point.kind, 'its')} {point.name}"
            text = (
                f"{feature.name} has no effect: {place} was never used in the phase {point.phase} (phases: setup, build = "
                "build of the model, step = training step, evaluate, checkpoint, teardown)"
            )
            others = outer.get(point.name, ()) if point.kind == "patch" else ()
            chain = tuple(f"{other} wraps {point.name} outside of {feature.name} and does not call it" for other in others)
            fix = f"remove {' or '.join((feature.name, *others))}, or check whether the model has the part that it changes"
            if feature.own_trainer.startswith("from "):
                fix += f". In a trainer without Megatron, use it by: {feature.own_trainer}"
            yield Problem("MS410", text, (feature.name, *others), chain, fix=advice(fix))
        elif point.state == "not effective":
            text = f"other code replaced {point.name} after {feature.name} patched it"
            later = Fix.advise("call mindspeed.activate after this other code has run")
            yield Problem("MS411", text, (feature.name,), fix=(later, Fix.remove_feature(feature.name)))


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr)


def _tally(points: Sequence[Effect], with_calls: bool = False) -> str:
    """``3 sites, 3 effective, 2 reached, 1 not yet due``."""
    effective, reached = sum(point.effective for point in points), sum(point.reached for point in points)
    calls = f" ({_count(sum(point.calls or 0 for point in points), 'call')})" if with_calls else ""
    pending = sum(point.state == "not yet due" for point in points)
    later = f", {pending} not yet due" if pending else ""
    return f"{_count(len(points), 'site')}, {effective} effective, {reached} reached{calls}{later}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _rank() -> int:
    group = _default_group()
    return group[0] if group is not None else int(os.environ.get("RANK", "0"))


def _default_group() -> tuple[int, int, Any] | None:
    """Rank, size and store of torch's default process group; None without one. Never imports torch."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    store = distributed.distributed_c10d._get_default_store()
    return distributed.get_rank(), distributed.get_world_size(), store
