"""The plan of a run of the trainer, and everything that is wrong with it before it has data and a folder. Light."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Final

from mindspeed import registry
from mindspeed.engine.planning.plan import ActivationPlan
from mindspeed.engine.resolution.environment import Environment
from mindspeed.engine.resolution.planned_feature import PlanNote
from mindspeed.engine.resolution.request import Layer
from mindspeed.plugins.answers import answer
from mindspeed.problems import CollectedProblems, Fix, Fixes, MindSpeedError, Problem, ResolutionError
from mindspeed.workbench.lint.configuration_rules import ConfigurationRules, installed_rules, rule_problems
from mindspeed.workbench.training import configurations, shape
from mindspeed.workbench.training.config import JOB_FILE, TrainConfig, train_config

_WAYS: Final = 2
"""Ways to mend a problem that are offered."""


@dataclass(frozen=True, slots=True)
class RunRequest:
    """Hold what a run is planned by. ``done`` are the steps of the checkpoint that it continues from."""

    layers: Sequence[Layer]
    config: TrainConfig
    environment: Environment
    vocab_size: int = 0
    done: int = 0

    @property
    def lowest(self) -> Layer:
        """The trainer's own layer."""
        return shape.trainer_layer(self.config, self.layers, self.environment.platform, self.vocab_size)

    def source(self, field: str) -> str:
        """Return where a field of the job comes from; empty for what no layer gives."""
        layers = (layer.source for layer in reversed([self.lowest, *self.layers]) if layer.world.get(field) is not None)
        return next(layers, "")

    def changed(self, fix: Fix) -> RunRequest:
        """Return the request that follows a fix."""
        layers = list(self.layers)
        feature, _, setting = fix.name.partition(".")
        if fix.verb == "give-field":
            layers.append(Layer("fix", world={fix.name: fix.value}))
        elif fix.verb == "drop-field":
            kept = ({name: value for name, value in layer.world.items() if name != fix.name} for layer in layers)
            layers = [replace(layer, world=world) for layer, world in zip(layers, kept, strict=True)]
        elif fix.verb == "remove-feature":
            layers.append(Layer("fix", without=(feature,)))
        elif fix.verb == "drop-setting":
            layers = [replace(layer, settings=_without(layer.settings, feature, setting)) for layer in layers]
        return reduce(RunRequest.changed, fix.steps, replace(self, layers=layers))


def plan_of_file(layers: Sequence[Layer], train: Mapping[str, Any], environment: Environment) -> ActivationPlan:
    """Return the plan that a run of a job file with the section ``train`` has.

    Data that are not here are not judged. Raises ResolutionError with every problem.
    """
    config, problems = train_config({JOB_FILE: train})
    plan, more = plan_run(RunRequest(layers, config, environment, shape.vocabulary(config)))
    problems += more
    if plan is not None and config.data:
        with suppress(ImportError, MindSpeedError):
            from mindspeed.workbench.training.data_source import enough_data, open_data

            problems += enough_data(open_data(config.data, config.tokenizer), config.held_out, plan.world.seq_length)
    if problems or plan is None:
        raise ResolutionError(problems)
    return plan


def plan_run(request: RunRequest) -> tuple[ActivationPlan | None, list[Problem]]:
    """Plan a run, by our conditions and by Megatron's rules for its configurations. Return the plan and every problem."""
    rules = installed_rules(request.environment.megatron)
    plan, problems, broken = _judged(request, rules)
    before = {*map(_place, (*problems, *broken))}
    return plan, [*problems, *(replace(one, fix=_mending(one, request, rules, before)) for one in broken)]


def _judged(
    request: RunRequest, rules: ConfigurationRules | None
) -> tuple[ActivationPlan | None, list[Problem], list[Problem]]:
    """Return the plan, what is wrong with it, and what Megatron would refuse, whose fixes are candidates."""
    problems = CollectedProblems()
    layers, environment, config = [request.lowest, *request.layers], request.environment, request.config
    problems += shape.check_world(shape.given_world(layers), request.vocab_size, environment.megatron)
    plan = problems.collect(lambda: registry.resolve(layers, environment))
    if plan is None:
        return None, problems, []
    problems += window_problems(plan, config.train_iters, request.done)
    unread = shape.without_effect(plan.world) & shape.given_world(request.layers).keys()
    notes = [PlanNote("note", "mindspeed pretrain", f"{name} has no effect in a dense model") for name in sorted(unread)]
    broken = shape.check_layers(plan.world, request.source)
    if rules is not None:
        of_job = configurations.of_job(plan.world, config)
        refused, undecided = rule_problems(rules, plan, of_job, request.source)
        broken += [problem for problem in refused if unread.isdisjoint(fact.name for fact in problem.facts)]
        notes += undecided
    elif environment.megatron is not None:
        text = f"the rules of megatron-core {environment.megatron}, which is not installed here"
        notes.append(PlanNote("not-checked", "megatron-core", text))
    return replace(plan, rows=(*plan.rows, *notes)), problems, broken


def _mending(problem: Problem, request: RunRequest, rules: ConfigurationRules | None, before: Set[tuple[str, ...]]) -> Fixes:
    """Return the fixes of a problem after which it is gone and no other one is new; else two of them together."""
    mending: list[Fix] = []
    for fix in problem.fix:
        new = _left(request.changed(fix), rules, before - {_place(problem)})
        if not new:
            mending.append(fix)
        elif len(new) == 1 and not mending:
            pairs = (Fix.together((fix, more)) for more in new[0].fix)
            mending += [pair for pair in pairs if not _left(request.changed(pair), rules, before - {_place(problem)})][:1]
    single = [fix for fix in mending if not fix.steps]
    return tuple(single or mending)[:_WAYS] or (shape.OTHER_SCRIPT,)


def _left(request: RunRequest, rules: ConfigurationRules | None, known: Set[tuple[str, ...]]) -> list[Problem]:
    """Return the problems of a changed request that are not known."""
    _, left, broken = _judged(request, rules)
    return [problem for problem in (*left, *broken) if _place(problem) not in known]


def _place(problem: Problem) -> tuple[str, ...]:
    """Return the identity of a problem, which stays when its values change."""
    return problem.code, problem.where, *([fact.name for fact in problem.facts] or [problem.message])


def _without(settings: Mapping[str, Mapping[str, Any]], feature: str, setting: str) -> dict[str, dict[str, Any]]:
    return {
        name: {key: value for key, value in fields.items() if (name, key) != (feature, setting)}
        for name, fields in settings.items()
    }


def window_problems(plan: ActivationPlan, last: int, done: int) -> list[Problem]:
    """MS301 for every feature that works only in steps which this run does not have."""
    problems = []
    classes = registry.feature_classes(plan)
    for planned in plan.features:
        name, feature = planned.name, classes[planned.name]
        window = answer(feature, "working_steps", feature.Args(**planned.args), plan.world)
        if window is None:
            continue
        first, end = window
        if end <= done or first > last:
            text = f"{name} works in steps {first} to {end}, but this run has steps {done + 1} to {last}"
            problems.append(Problem("MS301", text, (name,), fix=Fix.advise(f"change its steps, or remove {name}")))
    return problems
