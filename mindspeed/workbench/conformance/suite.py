"""All checks of one feature or distribution, in order."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic import ValidationError

from mindspeed import plugins as ms
from mindspeed import registry
from mindspeed.engine.inspection.contracts import ABSENT, contract_for
from mindspeed.engine.inspection.releases import recorded_releases
from mindspeed.engine.inspection.sites import find_site, near_targets
from mindspeed.engine.inspection.source import find_module, read_scope
from mindspeed.engine.planning.explanation import code_place
from mindspeed.engine.resolution.environment import Environment
from mindspeed.engine.resolution.request import Layer, parse_assignments
from mindspeed.plugins.conditions import ConditionError, Loose, conditions, texts
from mindspeed.plugins.discovery import BUILT_IN
from mindspeed.plugins.hookspecs import HOOKS, PROJECT
from mindspeed.plugins.manager import FeatureManager
from mindspeed.problems import ResolutionError
from mindspeed.registry import catalog
from mindspeed.workbench.conformance.application import CHECKS as APPLIED
from mindspeed.workbench.conformance.application import application, import_cost
from mindspeed.workbench.conformance.outcome import TODO, Outcome, judged
from mindspeed.workbench.conformance.subjects import Subject, rows_of, subjects
from mindspeed.workbench.diagnostics import doctor
from mindspeed.workbench.verification.case import VerificationCase, build_case
from mindspeed.workbench.verification.harness import verify
from mindspeed.workbench.verification.matrix.cases import MatrixCase
from mindspeed.workbench.verification.pool import WorkerPool

LONGEST_SUMMARY = 100


def schema(subject: Subject) -> Outcome:
    """Every setting is described, defaults are valid, and values survive YAML, JSON and the command line."""
    model: type[ms.FeatureArgs] = subject.feature.Args
    wrong = [f"the setting {key} has no description" for key, field in model.model_fields.items() if not field.description]
    count = len(model.model_fields)
    try:
        needs = any(field.is_required() for field in model.model_fields.values())
        args = model(**(_planned_args(subject) if needs else {}))
        wrong += _round_trips(subject.name, args)
        model.model_json_schema()
    except ValidationError as error:
        wrong += [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
    settings = f"{count} setting{'s' if count != 1 else ''}"
    text = f"{settings}, all described; defaults are valid; values survive --set, YAML and JSON" if count else "no settings"
    return judged(subject.name, "schema", wrong, text)


def _planned_args(subject: Subject) -> dict[str, Any]:
    """The settings of the feature in the job that suits it."""
    plan = subject.plan
    return next((feature.args for feature in plan.features if feature.name == subject.name), {}) if plan is not None else {}


def _round_trips(name: str, args: ms.FeatureArgs) -> Iterator[str]:
    plain = args.model_dump(mode="json")
    assignments = [f"{name}.{key}={json.dumps(value)}" for key, value in plain.items()]
    ways: dict[str, Any] = {
        "YAML": yaml.safe_load(yaml.safe_dump(plain)),
        "JSON": json.loads(args.model_dump_json()),
        "--set": parse_assignments(assignments, "--set").get(name, {}),
    }
    for way, values in ways.items():
        back = type(args)(**values)
        for key in type(args).model_fields:
            if getattr(back, key) != getattr(args, key):
                yield f"the setting {key} does not survive {way}: {getattr(args, key)!r} becomes {getattr(back, key)!r}"


def metadata(subject: Subject) -> Outcome:
    """The declaration is complete: it resolves, its hooks match, its messages can be formatted, its claim has a reason."""
    name, spec = subject.name, subject.feature.spec
    wrong = [line for problem in subject.problems for line in str(problem).splitlines()[:1]]
    summary = subject.feature.summary()
    if not summary:
        wrong.append("the class has no docstring")
    elif len(summary) > LONGEST_SUMMARY:
        wrong.append(f"the summary, its first line, is {len(summary)} characters long, not 1 to {LONGEST_SUMMARY}")
    if spec.numerics.claim != "exact" and not spec.numerics.reason:
        wrong.append(f"the numerics are {spec.numerics.claim}, but no reason is given")
    wrong += _unwritten_texts(subject.feature)
    wrong += _unmarked_hooks(subject.feature)
    wrong += [f"the {type(c).__name__} has no reason" for c in spec.constraints if getattr(c, "reason", "-") == ""]
    wrong += [f"the condition {c.name} at {c.where} has no docstring" for c in conditions(spec.constraints) if not c.about]
    if subject.plan is not None:
        args = subject.feature.Args(**_planned_args(subject))
        wrong += _unreadable_messages(spec.constraints, args)
        try:
            FeatureManager([subject.feature(args, subject.plan.world)])
        except ms.MindSpeedError as error:
            wrong.append(error.problems[0].message)
    count = len(spec.constraints)
    return judged(name, "metadata", wrong, f"{count} constraint{'s' if count != 1 else ''}, all on known names; hooks match")


def _unwritten_texts(feature: type[ms.Feature[Any]]) -> Iterator[str]:
    """Yield each text of the template that nobody has replaced."""
    if feature.summary().startswith(TODO):
        yield f"the summary is that of the template: {feature.summary()}"
    for key, field in feature.Args.model_fields.items():
        if (field.description or "").startswith(TODO):
            yield f"the description of the setting {key} is that of the template: {field.description}"
    readme = Path(inspect.getfile(feature)).with_name("README.md")
    for line in readme.read_text(encoding="utf-8").splitlines() if readme.is_file() else ():
        if TODO in line:
            yield f"README.md has a line of the template: {line}"


def _unmarked_hooks(feature: type[ms.Feature[Any]]) -> Iterator[str]:
    """Methods that look like hooks and lack the marker, which nothing would ever call."""
    for name, method in vars(feature).items():
        if name[0] == "_" or not callable(method) or hasattr(method, f"{PROJECT}_impl"):
            continue
        if name in HOOKS:
            yield f"the method {name} has the name of a hook but lacks @hookimpl, so it is never called"
        elif near := get_close_matches(name, sorted(HOOKS), n=1, cutoff=0.85):
            yield f"the method {name} is not a hook; did you mean {near[0]}, with @hookimpl?"


def _unreadable_messages(constraints: Any, args: ms.FeatureArgs) -> Iterator[str]:
    world = Loose(ms.World({}))
    for condition in conditions(constraints):
        if not condition.of:
            try:
                texts(condition, "", args, world)
            except ConditionError as error:
                yield f"the condition {condition.name} {error}"


def references(subject: Subject) -> Outcome:
    """Every string that names code of the feature names something."""
    named = []
    for planned in subject.patches:
        value = planned.patch.value
        if isinstance(value, ms.Ref):
            named.append(value.target)
        elif not isinstance(planned.patch, ms.Set):
            named.append(value)
    wrong = [text for reference in dict.fromkeys(named) if (text := _unresolved(reference))]
    count = len(set(named))
    return judged(subject.name, "references", wrong, f"{count} of {count} resolve" if count else "none")


def _unresolved(reference: str) -> str:
    module, _, path = reference.partition(":")
    found = find_module(module)
    if found is None:
        return f"{reference}: module {module} does not exist"
    scope = read_scope(found) if found.file is not None else None
    if scope is None or scope.stars or scope.last("__getattr__") is not None or code_place(reference).line:
        return ""  # compiled, bound by a star import, or made by the module itself: known at run time only
    return f"{reference}: {module} has no {path}"


def targets(subject: Subject) -> Outcome:
    """Every patched name exists in the Megatron that is installed; which recorded releases have it is said."""
    wrong, absent = [], False
    names = list(dict.fromkeys(name for p in subject.patches for name in (p.patch.target, *p.patch.clears)))
    for name in names:
        site = find_site(name)
        if site is None:
            near = " or ".join(near_targets(name))
            wrong.append(f"{name} does not exist{f'; did you mean {near}?' if near else ''}")
        elif site.kind == "absent":
            absent = True
    if absent and not wrong:
        return Outcome(subject.name, "targets", "not run", "megatron-core is not installed")
    return judged(subject.name, "targets", wrong, _known_releases(names, subject.plan.world if subject.plan else None))


def _known_releases(names: list[str], world: ms.World | None) -> str:
    if not names:
        return "no patches"
    here = f" in megatron-core {world.megatron}" if world is not None and world.knows("megatron") else ""
    text = f"{len(names)} of {len(names)} exist{here}"
    common = [version for version in recorded_releases() if all(_recorded(name, version) for name in names)]
    return f"{text}; recorded in {', '.join(common)}" if common else f"{text}; no release has recorded all of them"


def _recorded(name: str, version: str) -> bool:
    known = contract_for(name, version)
    return known is not None and known[0] == version and known[1].kind != ABSENT


def order(subject: Subject) -> Outcome:
    """Check with every other feature that the plan does not depend on the order of the two names."""
    if subject.plan is None:
        return Outcome(subject.name, "order", "not run", "no job is suitable for the feature")
    wrong: list[str] = []
    fitting: list[bool] = []
    world = subject.plan.world.known()
    platform = str(world.pop("platform"))
    world.pop("megatron", None)
    environment = registry.probe(platform)
    for other in subject.known.usable:
        if other == subject.name:
            continue
        answer = _answer((subject.name, other), world, environment)
        if answer != _answer((other, subject.name), world, environment):
            wrong.append(f"together with {other}, the plan depends on the order of the two names")
        fitting.append(answer[0])
    text = f"{sum(fitting)} of {len(fitting)} other features can be combined with it; no plan depends on the order of names"
    return judged(subject.name, "order", wrong, text)


def _answer(names: tuple[str, ...], world: dict[str, Any], environment: Environment) -> tuple[bool, Any]:
    """Return whether the names resolve, and the digest or the problems."""
    try:
        return True, registry.resolve([Layer("conformance", names, world=world)], environment, untried="none").digest
    except ms.MindSpeedError as error:
        return False, sorted((problem.code, problem.features) for problem in error.problems)


DECLARED: Final[dict[str, Callable[[Subject], Outcome]]] = {
    "schema": schema,
    "metadata": metadata,
    "references": references,
    "targets": targets,
    "order": order,
}
"""Checks that need nothing but the declaration."""

PARITY: Final = ("parity", "level 1")
"""Checks that train a tiny model, alone and beside all that optimization level 1 adds to a model with experts."""
CHECKS: Final = (*DECLARED, "import cost", *APPLIED, *PARITY)


class Suite:
    """The checks of a feature, or of all features of a distribution; each runs when its outcome is first read.

    ``prove`` also trains a tiny model with and without each feature, which takes a minute. Raises ResolutionError when
    nothing is called ``name``.
    """

    def __init__(self, name: str, prove: bool = False) -> None:
        self.prove = prove
        self.tested = subjects(name)
        self.loaded = [subject for subject in self.tested if subject.name in subject.known.usable]
        self._outcomes: dict[tuple[str, str], Outcome] = {}

    def outcome(self, subject: Subject, check: str) -> Outcome | None:
        """The outcome of one check; None for a feature that cannot be loaded, of which only the metadata are judged."""
        if subject not in self.loaded:
            return _broken(subject) if check == "metadata" else None
        if check in DECLARED:
            return DECLARED[check](subject)
        examination = {"import cost": import_cost, **dict.fromkeys(PARITY, self._parity)}.get(check, application)
        if (subject.name, check) not in self._outcomes:
            self._outcomes |= {(outcome.feature, outcome.check): outcome for outcome in examination(self.loaded)}
        return self._outcomes[subject.name, check]

    def _parity(self, tested: Sequence[Subject]) -> list[Outcome]:
        missing = ", ".join(problem.message for problem in doctor.problems()) if self.prove else ""
        if missing or not self.prove:
            reason = missing or "trains a small model; --parity runs it (pytest: --mindspeed-parity)"
            return [Outcome(subject.name, check, "not run", reason) for subject in tested for check in PARITY]
        with WorkerPool() as pool:
            return [_parity(subject, check, pool) for subject in tested for check in PARITY]


def examine(name: str, prove: bool = False) -> Iterator[Outcome]:
    """Yield every outcome of a `Suite` when it is known, feature by feature in the order of `CHECKS`."""
    suite = Suite(name, prove)
    outcomes = (suite.outcome(subject, check) for subject in suite.tested for check in CHECKS)
    yield from (outcome for outcome in outcomes if outcome is not None)


def _parity(subject: Subject, check: str, pool: WorkerPool) -> Outcome:
    """Train a tiny model with and without a feature and compare, as ``mindspeed features verify`` does."""
    try:
        verdict = verify(build_case([subject.name]) if check == PARITY[0] else _beside_level_one(subject.name), pool)
    except ms.MindSpeedError as error:
        lines = str(error).splitlines()
        return Outcome(subject.name, check, "failed", lines[0], tuple(lines[1:]))
    fine = f"with against without: {verdict.claim} holds in {len(verdict.checks)} comparisons"
    return judged(subject.name, check, [problem.message for problem in verdict.problems], fine)


def _beside_level_one(name: str) -> VerificationCase:
    """The case on a model with experts, to which most of level 1 applies; on a dense one for a feature that refuses experts."""
    try:
        return build_case([name], [Layer("conformance", world={"num_experts": 4})], level_one=True)
    except ResolutionError:
        return build_case([name], level_one=True)


def _broken(subject: Subject) -> Outcome:
    lines = [line for problem in subject.problems for line in str(problem).splitlines()]
    return Outcome(subject.name, "metadata", "failed", lines[0], tuple(lines[1:]))


def pairs_of(name: str) -> list[MatrixCase]:
    """Return the pairs of a distribution or feature. Raises ResolutionError (MS201) when nothing is called ``name``."""
    known = catalog()
    tested = {row.name for row in rows_of(name)} & known.usable.keys()
    others = tested | {row.name for row in known.usable.values() if row.distribution == BUILT_IN}
    pairs = {tuple(sorted((one, other))) for one in tested for other in others if one != other}
    return [MatrixCase(pair) for pair in sorted(pairs)]
