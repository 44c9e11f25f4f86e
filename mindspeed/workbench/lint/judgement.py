"""Check a training command: Megatron-LM's own rules, executed, and the problems of its plan."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from mindspeed import registry
from mindspeed.engine.inspection.cli_arguments import Surface
from mindspeed.engine.planning.build_plan import manager_of
from mindspeed.engine.planning.plan import ActivationPlan
from mindspeed.engine.resolution.environment import Environment
from mindspeed.engine.resolution.planned_feature import PlanNote
from mindspeed.engine.resolution.request import Layer
from mindspeed.job.fields import FIELDS
from mindspeed.job.megatron_arguments import dests_of, target_of
from mindspeed.job.world import PARALLEL_SIZES
from mindspeed.megatron.fixes.feature import bugs_mended_by
from mindspeed.megatron.parsed_arguments import problems_of_job, refused_values
from mindspeed.megatron_lm.argument_layers import declared_flags
from mindspeed.megatron_lm.command_line_fixes import MegatronCommandLine
from mindspeed.megatron_lm.given_arguments import given_arguments, surface_or_nearest, unknown_options
from mindspeed.megatron_lm.script_options import script_options
from mindspeed.megatron_lm.training_request import split_own_flags
from mindspeed.plugins.feature import Category
from mindspeed.problems import Fixes, MindSpeedError, Problem, ResolutionError
from mindspeed.workbench.lint.dry_run import left_open, located, read_and_plan_command, smallest_world, without_options
from mindspeed.workbench.lint.launched_command import LaunchedCommand
from mindspeed.workbench.lint.traps import STOPS, Trap, traps_of
from mindspeed.workbench.lint.upstream.process import Checkout, RulesProcess
from mindspeed.workbench.lint.upstream.rules import Command, RulesVerdict, judge

_OF_DEVICES: Final = re.compile(r"(CUDA|NCCL|NVTE|TORCH|PYTORCH|NVSHMEM|UB|HCCL|ASCEND)_\w+")
"""Environment variables that Megatron's rules read."""


@dataclass(frozen=True, slots=True)
class CheckedJob:
    """Hold a command, the environment that it is planned for, and the Megatron-LM whose rules judge it, where one does."""

    command: LaunchedCommand
    environment: Environment
    checkout: Checkout | None = None
    unjudged: str = ""
    """Why no Megatron-LM judges it, where one should."""

    @property
    def judge(self) -> str:
        """The Megatron-LM by which it is checked, and for what devices."""
        if self.checkout is not None:
            version = self.checkout.version or "of unknown version"
            found = f"the rules of Megatron-LM {version} in {self.checkout.folder} ({self.checkout.source})"
        else:
            known = surface_or_nearest(self.environment.megatron).version
            newest = "" if self.environment.megatron is not None else ", the newest recorded"
            found = f"the arguments of Megatron-LM {known}{newest}, without its rules"
        return f"{found}, for {self.environment.platform}"


def check_jobs(
    jobs: Sequence[CheckedJob], arch: str | None = None, layers: Sequence[Layer] = (), child: RulesProcess | None = None
) -> list[tuple[ActivationPlan | MindSpeedError, list[Trap]]]:
    """Return for each command its plan, or the error with every problem, and its traps, the worst first.

    ``layers`` are those of the request, that of the command line last. ``child`` is a process of the first checkout, if it has
    been made.
    """
    planned = [_planned(job, layers) for job in jobs]
    verdicts = _verdicts(jobs, planned, layers, arch, child)
    checked = []
    for job, (words, plan), verdict in zip(jobs, planned, verdicts, strict=True):
        traps = _traps_in(job, words, plan)
        checked.append((_with_rules(job, plan, verdict, traps, layers), traps))
    return checked


Planned = tuple[Sequence[str], ActivationPlan | MindSpeedError]
"""The arguments that Megatron's parser gets, and the plan, or the error with its problems."""


def _verdicts(
    jobs: Sequence[CheckedJob],
    planned: Sequence[Planned],
    layers: Sequence[Layer],
    arch: str | None,
    child: RulesProcess | None,
) -> list[RulesVerdict]:
    """Run the rules of the checkouts of some commands, those of one checkout in one process. No verdict has no problem."""
    verdicts = dict.fromkeys(range(len(jobs)), RulesVerdict())
    groups: dict[tuple[Checkout, str | None], list[int]] = {}
    for number, job in enumerate(jobs):
        if job.checkout is not None:
            groups.setdefault((job.checkout, job.environment.megatron), []).append(number)
    for (checkout, megatron), numbers in groups.items():
        known, process = surface_or_nearest(megatron), child if child and child.checkout == checkout.folder else None
        commands = [_megatron_command(jobs[number], *planned[number], known, layers) for number in numbers]
        verdicts.update(zip(numbers, judge(checkout, commands, known, arch, process), strict=True))
        child = None if process is not None else child
    return list(verdicts.values())


def _planned(job: CheckedJob, layers: Sequence[Layer]) -> Planned:
    """The arguments of a command and its plan, or the error with its problems.

    What refuses a command of Megatron alone must be a rule of Megatron: problems of features of ours that its arguments bring,
    and of arguments that layers ignore, are warnings then.
    """
    words, plan = _plan_or_error(job, job.command, layers)
    if isinstance(plan, ActivationPlan) or not _is_stock(job, layers):
        return words, plan
    known = surface_or_nearest(job.environment.megatron)
    given = given_arguments([word.text for word in job.command.arguments], known)
    catalog = registry.catalog_for(())
    of_megatron = {name for name, spec in catalog.specs.items() if spec.category is Category.MEGATRON}
    declared = [(name, flag.dest) for name, flag in declared_flags(catalog) if name not in of_megatron]
    ours = {name for name, dest in declared if dest in given}
    ignored = {fact.option for problem in plan.problems if problem.code == "MS605" for fact in problem.facts if fact.option}
    if not ours and not ignored:
        return words, plan
    ignored |= {given[dest].option for _, dest in declared if dest in given}
    command_line = layers[-1] if layers else Layer("command line")
    fewer = [*layers[:-1], replace(command_line, without=(*command_line.without, *sorted(ours)))]
    _, again = _plan_or_error(job, without_options(job.command, ignored), fewer)
    left = again.problems if isinstance(again, MindSpeedError) else ()
    reported = [problem for problem in plan.problems if problem not in left]
    if isinstance(again, MindSpeedError):
        return words, ResolutionError([problem for problem in plan.problems if problem in left] or left, again.words)
    warnings = (PlanNote("warning", "mindspeed", problem.message) for problem in reported)
    return words, replace(again, rows=(*again.rows, *warnings))


def _plan_or_error(job: CheckedJob, command: LaunchedCommand, layers: Sequence[Layer]) -> Planned:
    try:
        options = _own_options(job, surface_or_nearest(job.environment.megatron))
        request, plan = read_and_plan_command(command, job.environment, layers[:-1], layers[-1:], options)
    except MindSpeedError as error:
        known_part = without_options(command, left_open(command, surface_or_nearest(job.environment.megatron)))
        return split_own_flags([word.text for word in known_part.arguments], [])[1], error
    return request.rest, plan


def _is_stock(job: CheckedJob, layers: Sequence[Layer]) -> bool:
    """Return whether a command is one of Megatron alone, on the devices that it is made for.

    It requests no features of ours, and has no options that only MindSpeed has.
    """
    if job.environment.platform != "cuda":
        return False
    own, words = split_own_flags([word.text for word in job.command.arguments], [])
    ours = own or unknown_options(words, surface_or_nearest(job.environment.megatron)) or any(one.features for one in layers)
    return not ours


def _with_rules(
    job: CheckedJob,
    plan: ActivationPlan | MindSpeedError,
    verdict: RulesVerdict,
    traps: Sequence[Trap],
    layers: Sequence[Layer],
) -> ActivationPlan | MindSpeedError:
    """The plan of a command with what the rules of its checkout say of it, or the error with every problem."""
    command, environment = job.command, job.environment
    known, is_stock = surface_or_nearest(environment.megatron), _is_stock(job, layers)
    explained = {trap.rule for trap in traps if trap.rule and trap.consequence == STOPS}
    theirs = [one for one in (verdict.problems if is_stock else verdict.refusals) if one.rule not in explained]
    if isinstance(plan, MindSpeedError) and not is_stock:
        at_start = verdict.at_start if _has_sizes_of_command(job, layers) else ()
        theirs = [one for one in theirs if one.where in at_start or _is_certain(one)]
    problems = [located(problem, command, known, registry.catalog_for(())) for problem in theirs]
    problems += [trap.problem for trap in traps if trap.consequence == STOPS]
    if isinstance(plan, MindSpeedError):
        return ResolutionError(one_of_each(problems, plan.problems, known), plan.words)
    if not problems and not is_stock:
        problems = [*refused_values(verdict.refused, plan.overrides), *_problems_of_job(verdict, plan)]
    if problems:
        return ResolutionError(problems, MegatronCommandLine(environment.megatron))
    notes = list(verdict.notes(job.checkout)) if job.checkout is not None else []
    notes += [trap.note for trap in traps]
    notes += [PlanNote("warning", "megatron-lm", problem.message) for problem in verdict.unread]
    if job.unjudged:
        notes.append(PlanNote("not-checked", "megatron-lm", job.unjudged))
    return replace(plan, rows=(*plan.rows, *notes))


def _is_certain(problem: Problem) -> bool:
    """Return whether a rule refuses values of the command, or the lack of values, whatever a plan would change."""
    return all(fact.option for fact in problem.facts) or all(fact.value is None for fact in problem.facts)


def _has_sizes_of_command(job: CheckedJob, layers: Sequence[Layer]) -> bool:
    """Return whether no plan would change the parallel sizes of a command, by which batches are split over its ranks."""
    own, _ = split_own_flags([word.text for word in job.command.arguments], [])
    return not own and not any(layer.settings or layer.world.keys() & PARALLEL_SIZES for layer in layers)


def _problems_of_job(verdict: RulesVerdict, plan: ActivationPlan) -> list[Problem]:
    """Return what the ranks of a plan refuse in the job that Megatron-LM makes of the arguments."""
    features = manager_of(plan, registry.catalog_for(plan.names), registry.base_features(plan.environment["platform"])).features
    return problems_of_job(verdict.job, plan, features)


def one_of_each(theirs: Sequence[Problem], ours: Sequence[Problem], known: Surface) -> list[Problem]:
    """Return the problems of Megatron's rules, and the separate ones that are about other values of the command."""
    about = {given: problem for problem in reversed(theirs) if (given := _given(problem, known))}
    fixes: dict[Problem, Fixes] = {}
    left = []
    for problem in ours:
        if (same := about.get(_given(problem, known))) is not None:
            fixes.setdefault(same, _better_fix(same, problem, known))
        else:
            left.append(problem)
    return [replace(problem, fix=fixes.get(problem, problem.fix)) for problem in theirs] + left


def _better_fix(theirs: Problem, ours: Problem, known: Surface) -> Fixes:
    """Return our fix where it can be typed, but theirs where both change one value of the model: their rule must hold."""
    options = {argument.dest for fix in theirs.fix if (argument := known.by_option.get(fix.name)) is not None}
    of_model = {dest for fix in ours.fix if fix.name not in PARALLEL_SIZES for dest in dests_of(fix.name)}
    is_advice = all(fix.verb == "advice" for fix in ours.fix)
    return theirs.fix if is_advice or options & of_model else ours.fix


def _given(problem: Problem, known: Surface) -> frozenset[str]:
    """Return what a problem is about: Megatron's arguments on the command line by dest, and fields that its launcher gives."""
    options = (known.by_option.get(fact.option) for fact in problem.facts if fact.option)
    launched = {fact.name for fact in problem.facts if not fact.option and fact.name in FIELDS and not dests_of(fact.name)}
    return frozenset(launched | {argument.dest for argument in options if argument is not None})


def _megatron_command(
    job: CheckedJob, words: Sequence[str], plan: ActivationPlan | MindSpeedError, known: Surface, layers: Sequence[Layer]
) -> Command:
    """The command that the rules judge: as its ranks change it, but one of Megatron alone as it stands."""
    size = job.environment.world_size or job.command.world_size or smallest_world(words, known)
    environ, unknown = _environ(job.command), _unknown(job.command, known)
    if isinstance(plan, MindSpeedError) or _is_stock(job, layers):
        return Command(words, size, environ, unknown=unknown)
    return Command(words, size, environ | registry.process_variables(plan, environ), plan, unknown)


def _unknown(command: LaunchedCommand, known: Surface) -> frozenset[str]:
    """The arguments of a command, by dest, whose value only a run of its script would know."""
    return frozenset(known.by_option[option].dest for option in left_open(command, known))


def _own_options(job: CheckedJob, known: Surface) -> frozenset[str]:
    """The options of the script of a command, which is read where the command has an option that Megatron-LM lacks."""
    command = job.command
    if not unknown_options([word.text for word in command.arguments], known):
        return frozenset()
    checkout = job.checkout.folder if job.checkout is not None else None
    return script_options(command.program, Path(command.source), checkout)


def _environ(command: LaunchedCommand) -> dict[str, str]:
    """The environment variables of a command that Megatron's rules read."""
    inherited = {name: value for name, value in os.environ.items() if _OF_DEVICES.fullmatch(name)}
    return inherited | dict(command.environ)


def _traps_in(job: CheckedJob, words: Sequence[str], plan: ActivationPlan | MindSpeedError) -> list[Trap]:
    """The traps that the arguments of a command fall into, the worst first, also with the values and patches of its plan."""
    known = surface_or_nearest(job.environment.megatron)
    given = {dest: one.value for dest, one in given_arguments(words, known).items()}
    environ, platform = _environ(job.command), job.environment.platform
    traps = traps_of(given, known, environ, platform, job.command.launcher, job.command.program)
    unknown = _unknown(job.command, known)
    found = [trap for trap in traps if unknown.isdisjoint(trap.reads)]
    if isinstance(plan, MindSpeedError) or not found:
        return found
    overrides = {target_of(one.override.argument, given): one.override.value for one in plan.overrides}
    changed = given | {target.dest: target.as_argument(value) for target, value in overrides.items()}
    left = list(traps_of(changed, known, environ, platform, job.command.launcher, job.command.program))
    mended = bugs_mended_by(plan)
    return [trap for trap in found if trap in left and trap.name not in mended]
