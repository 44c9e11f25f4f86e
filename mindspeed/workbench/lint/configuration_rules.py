"""Judge the configurations that a native job makes by Megatron's rules, which run in a child process without torch."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from mindspeed.engine.inspection.megatron_copies import package_root, version_of
from mindspeed.engine.planning.plan import ActivationPlan, PlannedOverride
from mindspeed.engine.resolution.planned_feature import PlanNote
from mindspeed.job.fields import FIELDS
from mindspeed.megatron.configuration import BuiltConfiguration
from mindspeed.problems import Fix, GivenValue, Problem
from mindspeed.workbench.lint.upstream.process import rules_command

_FIELD_OF: Final = {field.built_names[0]: name for name, field in reversed(FIELDS.items()) if field.built_names}
"""The field of the job that an attribute of a configuration gives."""


@dataclass(frozen=True, slots=True)
class FailedRule:
    """Hold a rule that a configuration breaks: its place and message, the values that it read, and what would satisfy it."""

    file: str
    line: int
    text: str
    message: str
    values: Mapping[str, Any]
    wanted: Sequence[tuple[str, str, str]]


@dataclass(frozen=True, slots=True)
class ConfigurationVerdict:
    """Hold the rules that configurations break, what could not be decided, and the fields of the job that they give."""

    broken: Sequence[FailedRule] = ()
    undecided: Sequence[str] = ()
    built: Mapping[str, Any] = field(default_factory=dict)


class ConfigurationRules:
    """A process that judges configurations of the megatron-core in a folder, one after the other."""

    def __init__(self, folder: Path) -> None:
        command = rules_command("configuration_child", folder, {})
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(command, text=True, **pipes)
        self.folder = folder
        atexit.register(self.close)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    def judge(self, configurations: Sequence[BuiltConfiguration], overrides: Mapping[str, Any]) -> ConfigurationVerdict:
        """Make configurations with a plan's values in them."""
        task = {"configurations": list(map(asdict, configurations)), "overrides": dict(overrides)}
        try:
            self._process.stdin.write(json.dumps(task) + "\n")  # type: ignore[union-attr]
            self._process.stdin.flush()  # type: ignore[union-attr]
            answer = json.loads(self._process.stdout.readline())  # type: ignore[union-attr]
        except (OSError, ValueError) as error:
            return ConfigurationVerdict((), (f"the rules of megatron-core in {self.folder} cannot be run: {error}",))
        broken = [FailedRule(**{name: one[name] for name in FailedRule.__slots__}) for one in answer["failed"]]
        undecided = [*answer["errors"], *(f"{one['file']}:{one['line']}" for one in answer["undecided"])]
        return ConfigurationVerdict(broken, undecided, answer["built"])


@lru_cache(maxsize=1)
def _rules(folder: Path, process: int) -> ConfigurationRules:
    """The rules of a folder for one process: a fork cannot share the pipes of its parent."""
    return ConfigurationRules(folder)


def installed_rules(version: str | None) -> ConfigurationRules | None:
    """Start the rules of the installed megatron-core; None for a job of another version."""
    root = package_root("core")
    if root is None or version is None or version_of(root) != version:
        return None
    return _rules(root.parent, os.getpid())


def rule_problems(
    rules: ConfigurationRules, plan: ActivationPlan, configurations: Sequence[BuiltConfiguration], source: Callable[[str], str]
) -> tuple[list[Problem], list[PlanNote]]:
    """Return a problem for each rule that the configurations of a plan break, and a row for what cannot be decided.

    ``source`` says where a field of the job comes from. The fixes of a problem are candidates, each of which may break
    another rule. A field that the configurations give another value is a problem too.
    """
    overrides = {planned.override.argument: planned for planned in plan.overrides if _is_put(planned, configurations)}
    verdict = rules.judge(configurations, {name: planned.override.value for name, planned in overrides.items()})
    problems = [_problem(rule, plan, overrides, source) for rule in verdict.broken]
    known = plan.world.known()
    for name, value in verdict.built.items() if not verdict.broken else ():
        built = FIELDS[name].typed(value)
        if name in known and known[name] != built:
            problems.append(_ignored(name, known[name], built, source(name)))
    notes = [PlanNote("not-checked", "megatron-core", f"a rule of megatron-core: {text}") for text in verdict.undecided]
    return problems, notes


def _ignored(name: str, value: Any, built: Any, source: str) -> Problem:
    text = f"{name} is {value}, but mindspeed pretrain builds a model with {built}"
    return Problem("MS301", text, where=source, fix=Fix.give_field(name, built), facts=(GivenValue(name, value, source),))


def _is_put(planned: PlannedOverride, configurations: Sequence[BuiltConfiguration]) -> bool:
    """Return whether a plan's value is put into these configurations, as far as that is known without torch."""
    only = planned.override.only
    values = {name: value for one in configurations for name, value in one.values.items()}
    return only is None or (not isinstance(only, str) and all(values.get(name) == value for name, value in dict(only).items()))


def _problem(
    rule: FailedRule, plan: ActivationPlan, overrides: Mapping[str, PlannedOverride], source: Callable[[str], str]
) -> Problem:
    givers = {name: _setting(plan, overrides[name]) for name in rule.values if name in overrides}
    facts, world = [], plan.world.known()
    for name, value in rule.values.items():
        setting, field_name = givers.get(name, ""), _FIELD_OF.get(name, name)
        owners = ", ".join(overrides[name].owners) if name in overrides else source(field_name)
        facts.append(GivenValue(setting or field_name, world.get(field_name, value), owners))
    features = tuple(owner for name in givers for owner in overrides[name].owners)
    fixes = [fix for wanted in rule.wanted for fix in _ways_to_give(*wanted, rule.values.get(wanted[0]))]
    fixes += [
        Fix.give_field(name, FIELDS[name].default)
        for name in (fact.name for fact in facts)
        if name in FIELDS and FIELDS[name].has_default
    ]
    fixes += map(Fix.drop_setting, filter(None, givers.values()))
    fixes += map(Fix.remove_feature, dict.fromkeys(features))
    version = plan.environment.get("megatron")
    text = f"megatron-core {version} refuses the configuration of this job: {rule.message or rule.text}"
    chain = ", ".join(f"{fact.name} is {fact.value} ({fact.source or 'default'})" for fact in facts)
    rows = tuple(filter(None, (f"its rule is {rule.text}" if rule.text and rule.message else "", chain)))
    where = f"{Path(rule.file).name}:{rule.line}"
    return Problem("MS115", text, features, chain=rows, where=where, fix=tuple(fixes), facts=tuple(facts), rule=where)


def _setting(plan: ActivationPlan, planned: PlannedOverride) -> str:
    """The setting that gives an override its value; empty where it is none, or not certain."""
    wanted = planned.override.value
    found = [
        f"{feature.name}.{name}"
        for feature in plan.features
        if feature.name in planned.owners
        for name, value in feature.settings.items()
        if value.value == wanted
    ]
    return found[0] if len(found) == 1 else ""


def _ways_to_give(attribute: str, relation: str, wanted: str, present: Any) -> Iterator[Fix]:
    """Yield the values of a field of the job that an attribute is wanted to have."""
    if (name := _FIELD_OF.get(attribute)) is None:
        return
    kind = FIELDS[name].kind
    if kind is bool and wanted in ("on", "off"):
        yield Fix.give_field(name, wanted == "on")
    elif kind is int and wanted.isdecimal() and isinstance(present, int):
        number = int(wanted)
        multiple = -(-present // number) * number if number else 0
        related = {"other than": present + 1, "more than": number + 1, "less than": number - 1, "a multiple of": multiple}
        yield Fix.give_field(name, related.get(relation, number))
    elif kind is float and (relation, wanted) == ("other than", "None"):
        yield Fix.give_field(name, 1.0)
    elif kind is str and relation in ("", "one of"):
        yield from (Fix.give_field(name, word) for word in wanted.split(", "))
