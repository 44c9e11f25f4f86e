"""The plan of a run of the trainer, and everything that is wrong with it before it has data and a folder. Light."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from mindspeed import registry
from mindspeed.engine.planning.plan import ActivationPlan
from mindspeed.engine.resolution.applied_fixes import JobRequest
from mindspeed.engine.resolution.environment import Environment
from mindspeed.engine.resolution.mending import with_tried_fixes
from mindspeed.engine.resolution.planned_feature import PlanNote
from mindspeed.engine.resolution.request import Layer
from mindspeed.engine.resolution.resolution_state import Suggestions
from mindspeed.plugins.answers import answer
from mindspeed.problems import Fix, MindSpeedError, Problem, ResolutionError
from mindspeed.workbench.lint.configuration_rules import installed_rules, rule_problems
from mindspeed.workbench.training import configurations, shape
from mindspeed.workbench.training.config import JOB_FILE, TrainConfig, train_config
from mindspeed.workbench.training.storage import storage_problems


class RunRequest(NamedTuple):
    """Hold what a run is planned by. ``done`` are the steps of the checkpoint that it continues from."""

    job: JobRequest
    config: TrainConfig
    vocab_size: int = 0
    done: int = 0

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The layers of the job above the trainer's own."""
        lowest = shape.trainer_layer(self.config, self.job.layers, self.job.environment.platform, self.vocab_size)
        return lowest, *self.job.layers

    def source(self, field: str) -> str:
        """Return where a field of the job comes from; empty for what no layer gives."""
        return next((layer.source for layer in reversed(self.layers) if layer.world.get(field) is not None), "")


def plan_of_file(layers: Sequence[Layer], train: Mapping[str, Any], environment: Environment) -> ActivationPlan:
    """Return the plan that a run of a job file with the section ``train`` has.

    Data that are not here are not judged. Raises ResolutionError with every problem.
    """
    config, problems = train_config({JOB_FILE: train})
    plan, more = plan_run(RunRequest(JobRequest(tuple(layers), environment), config, shape.vocabulary(config)))
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

    def problems_of(job: JobRequest, suggestions: Suggestions) -> list[Problem]:
        return _judged(request._replace(job=job), suggestions)[1]

    plan, problems = _judged(request, "declared")
    return plan, [*storage_problems(request.config), *with_tried_fixes(problems, request.job, problems_of)]


def _judged(request: RunRequest, suggestions: Suggestions) -> tuple[ActivationPlan | None, list[Problem]]:
    """Return the plan and the problems, with untried fixes."""
    layers, environment = request.layers, request.job.environment
    problems = shape.check_world(shape.given_world(layers), request.vocab_size, environment.megatron)
    reported = {fact.name for problem in problems for fact in problem.facts}
    plan, refused = registry.judge(JobRequest(layers, environment), suggestions)
    problems += refused
    if plan is None:
        return None, problems
    problems += window_problems(plan, request.config.train_iters, request.done)
    unread = shape.without_effect(plan.world) & shape.given_world(request.job.layers).keys()
    notes = [PlanNote("note", "mindspeed pretrain", f"{name} has no effect in a dense model") for name in sorted(unread)]
    problems += shape.check_layers(plan.world, request.source)
    if (rules := installed_rules(environment.megatron)) is not None:
        of_job = configurations.of_job(plan.world, request.config)
        broken, undecided = rule_problems(rules, plan, of_job, request.source)
        known = unread | reported
        problems += [problem for problem in broken if known.isdisjoint(fact.name for fact in problem.facts)]
        notes += undecided
    elif environment.megatron is not None:
        text = f"the rules of megatron-core {environment.megatron}, which is not installed here"
        notes.append(PlanNote("not-checked", "megatron-core", text))
    return replace(plan, rows=(*plan.rows, *notes)), problems


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
            fix = (Fix.advise("change its steps"), Fix.remove_feature(name))
            problems.append(Problem("MS301", text, (name,), fix=fix))
    return problems
