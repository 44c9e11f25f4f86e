"""Fixes of what Megatron's rules refuse: options that a user can type, each tried with the rules before it is shown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, permutations
from typing import Any, Final

from mindspeed.engine.inspection.cli_arguments import Argument, Surface
from mindspeed.job.megatron_arguments import dests_of
from mindspeed.job.world import PARALLEL_SIZES
from mindspeed.megatron_lm.given_arguments import given_arguments, without_option
from mindspeed.problems import Fix, Problem
from mindspeed.workbench.lint.upstream.derived_names import DerivedNames

NEEDED: Final = frozenset(
    {
        *("num_layers", "hidden_size", "num_attention_heads", "seq_length", "max_position_embeddings"),
        *("micro_batch_size", "lr", "tokenizer_type"),
    }
)
"""Arguments without which nothing is trained: no fix removes them."""
_SIZES: Final = frozenset(dest for name in PARALLEL_SIZES for dest in dests_of(name))
_MAX_SHOWN: Final = 3
_MAX_TRIED: Final = 80
_STEPS: Final = (1, -1, 2, -2, 3, -3, 4, -4)

Places = frozenset[str]
"""The rules that refuse a command, as problems name them: file and line."""
Trials = Callable[[Sequence[Mapping[str, Any]]], Sequence[Places | None]]
"""Return for each task what refuses it; None where that is not known."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Hold a refused command: its task, the places that refuse it, and its problems."""

    task: Mapping[str, Any]
    places: Places
    problems: Sequence[Problem]


@dataclass(frozen=True, slots=True)
class _Trial:
    """Describe a fix to try: the task with it, and what it is about; of the fixes about one thing the first one is shown.

    Those that are not about what the rule reads are shown where no other one mends.
    """

    fix: Fix
    about: str
    task: Mapping[str, Any]
    is_related: bool = True


def mended(refused: Sequence[Refused], known: Surface, derived: DerivedNames, trials: Trials) -> list[list[Problem]]:
    """Return the problems of each command with the fixes that mend them, of which none leads to another refusal if possible."""
    keys = [(command, number) for command, one in enumerate(refused) for number in range(len(one.problems))]
    first: dict[tuple[int, int], list[_Trial]] = {}
    for command, number in keys:
        some = _first_fixes(refused[command].problems[number], refused[command].task["words"], known)
        first[command, number] = list(_trials(some, refused[command].task, known))
    found = _tried(refused, first, trials)
    further: dict[tuple[int, int], list[_Trial]] = {}
    for command, number in (key for key in keys if not found[key][0]):
        task, problem = refused[command].task, refused[command].problems[number]
        dests = _read_by(problem, known, derived)
        related = list(_trials(_further_fixes(dests, task["words"], known), task, known))
        others = list(_trials(_removals_of_others(dests, task["words"], known), task, known))
        tried = [*related, *(replace(trial, is_related=False) for trial in others)]
        further[command, number] = tried[:_MAX_TRIED]
    more = _tried(refused, further, trials)
    problems: list[list[Problem]] = [[] for _ in refused]
    for command, number in keys:
        problem = refused[command].problems[number]
        clean, mending = found[command, number]
        more_clean, more_mending = more.get((command, number), ([], []))
        untried = [fix for fix in problem.fix if fix.verb != "advice" and with_fix(fix, refused[command].task, known) is None]
        fixes = clean or more_clean or mending or more_mending or untried or [_in_words(problem)]
        problems[command].append(replace(problem, fix=tuple(fixes)))
    return problems


def _in_words(problem: Problem) -> Fix:
    """Return the advice for a rule that no change of one or two options satisfies."""
    derives = any(fact.source.startswith("derived") for fact in problem.facts)
    kept = not derives and len(problem.fix) == 1 and problem.fix[0].verb == "advice"
    return problem.fix[0] if kept else Fix.advise("read the rule, and change what it refuses")


def _tried(
    refused: Sequence[Refused], wanted: Mapping[tuple[int, int], Sequence[_Trial]], trials: Trials
) -> dict[tuple[int, int], tuple[list[Fix], list[Fix]]]:
    """Return for each problem the fixes that lead to no other refusal, and those that mend this one only."""
    flat = [(key, trial) for key, some in wanted.items() for trial in some]
    answers = trials([trial.task for _, trial in flat]) if flat else []
    found: dict[tuple[int, int], tuple[list[_Trial], list[_Trial]]] = {key: ([], []) for key in wanted}
    for (key, trial), places in zip(flat, answers, strict=True):
        command, number = key
        if places is None or refused[command].problems[number].where in places:
            continue
        is_for_user = trial.fix.verb == "give-option" and trial.fix.value is None and not trial.fix.note
        is_clean = places <= refused[command].places or is_for_user
        found[key][0 if is_clean else 1].append(trial)
    return {key: (_shown(clean), _shown(mending)) for key, (clean, mending) in found.items()}


def _shown(trials: Sequence[_Trial]) -> list[Fix]:
    """Return the fixes to show of those that mend: the first about each thing, unrelated ones only without others.

    Of several steps none may be a fix of its own.
    """
    kept = [trial for trial in trials if trial.is_related] or trials
    first: dict[str, Fix] = {}
    for trial in kept:
        first.setdefault(trial.about, trial.fix)
    alone = {fix for fix in first.values() if not fix.steps}
    return [fix for fix in first.values() if alone.isdisjoint(fix.steps)][:_MAX_SHOWN]


def _values(problem: Problem, known: Surface) -> dict[str, Any]:
    """Return the values that a rule read: of arguments by dest, of other attributes by name."""
    options = {fact.name: known.by_option.get(fact.name) for fact in problem.facts}
    return {argument.dest if (argument := options[fact.name]) else fact.name: fact.value for fact in problem.facts}


def _first_fixes(problem: Problem, words: Sequence[str], known: Surface) -> Iterator[Fix]:
    """Yield the fixes that a problem has, with a number in the place of an argument that is needed or is a size of the job.

    Of several lists, a short one is also given the length of another one.
    """
    values, given = _values(problem, known), given_arguments(words, known)
    lists = {dest: one for dest in values if (one := given.get(dest)) is not None and isinstance(one.value, list)}
    for one, other in permutations(lists.values(), 2):
        if len(one.value) < len(other.value):
            padded = [*one.value, *one.value[-1:] * (len(other.value) - len(one.value))]
            yield Fix.give_option(one.option, " ".join(map(str, padded)))
    for fix in problem.fix:
        argument = known.by_option.get(fix.name)
        if fix.verb == "drop-option" and argument is not None and argument.dest in NEEDED | _SIZES:
            yield from _other_numbers(argument, values.get(argument.dest))
        else:
            yield fix


def _read_by(problem: Problem, known: Surface, derived: DerivedNames) -> list[str]:
    """Return the arguments with options that a rule reads, directly or by what they decide."""
    names = frozenset(argument.dest for argument in known.arguments if argument.options)
    found = ([name] if name in names else derived.sources(name, names) for name in _values(problem, known))
    return list(dict.fromkeys(dest for dests in found for dest in dests))


def _further_fixes(dests: Sequence[str], words: Sequence[str], known: Surface) -> Iterator[Fix]:
    """Yield changes of these arguments, then the removal of two or all of them."""
    given = given_arguments(words, known)
    for dest in dests:
        argument = next(one for one in known.by_dest[dest] if one.options)
        yield from _changes(argument, given[dest].value if dest in given else None, dest in given)
    removable = [dest for dest in dests if dest in given and dest not in NEEDED]
    for pair in combinations(removable, 2):
        yield Fix.together(Fix.drop_option(given[dest].option) for dest in pair)
    if len(removable) > 2:
        yield Fix.together(Fix.drop_option(given[dest].option) for dest in removable)


def _removals_of_others(dests: Sequence[str], words: Sequence[str], known: Surface) -> Iterator[Fix]:
    """Yield the removal of each option that is given and gives none of these arguments."""
    given = given_arguments(words, known)
    yield from (Fix.drop_option(one.option) for dest, one in given.items() if dest not in NEEDED | _SIZES | {*dests})


def _changes(argument: Argument, value: Any, is_given: bool) -> Iterator[Fix]:
    """Yield the removal of an argument that is given, and other values of it."""
    option = argument.options[0]
    if is_given and argument.dest not in NEEDED | _SIZES:
        yield Fix.drop_option(option)
    if not argument.takes_value:
        yield from () if is_given else (Fix.give_option(option),)
    elif argument.choices:
        yield from (Fix.give_option(option, choice) for choice in argument.choices if choice not in (value, argument.default))
    elif is_given:
        yield from _other_numbers(argument, value)
    elif argument.type == "int":
        yield from (Fix.give_option(option, number) for number in (1, 2))


def _other_numbers(argument: Argument, value: Any) -> Iterator[Fix]:
    """Yield an argument with whole numbers near to its value."""
    if isinstance(value, int) and not isinstance(value, bool):
        numbers = [*(value + step for step in _STEPS), value * 2, value // 2]
        yield from (Fix.give_option(argument.options[0], number) for number in numbers if number > 0)


def _trials(fixes: Iterable[Fix], task: Mapping[str, Any], known: Surface) -> Iterator[_Trial]:
    for fix in dict.fromkeys(fixes):
        changed = with_fix(fix, task, known)
        if changed is not None and (changed["words"], changed["environ"]) != (task["words"], task["environ"]):
            yield _Trial(fix, " ".join([fix.name, *(step.name for step in fix.steps)]), changed)


def with_fix(fix: Fix, task: Mapping[str, Any], known: Surface) -> dict[str, Any] | None:
    """Return a task with a fix; None for a fix that cannot be tried."""
    words, environ = list(task["words"]), dict(task["environ"])
    for step in fix.steps or (fix,):
        argument = known.by_option.get(step.name)
        if step.verb == "run-command":
            command, _, assignment = step.name.partition(" ")
            name, _, value = assignment.partition("=")
            environ.pop(name, None)
            environ |= {name: value} if command == "export" else {}
        elif argument is None or "--" in words:
            return None
        elif step.verb == "drop-option":
            words = without_option(words, argument.dest, known)
        elif step.verb == "give-option":
            if (values := _words_of(step, argument)) is None:
                return None
            words = [*without_option(words, argument.dest, known), step.name, *values]
        else:
            return None
    return {**task, "words": words, "environ": environ}


def _words_of(fix: Fix, argument: Argument) -> list[str] | None:
    """Return the values of an option as a fix gives them, or as its example does; None where it has neither."""
    if not argument.takes_value:
        return []
    value = fix.value if fix.value is not None else fix.example
    if value is not None:
        return str(value).split()
    if fix.note:
        return None
    sample = argument.choices[0] if argument.choices else "1"
    return [str(sample)] * (argument.nargs if isinstance(argument.nargs, int) else 1)
