"""Plan a training command without running it: what Megatron's parser would refuse, and every problem of the plan."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from difflib import get_close_matches
from math import lcm
from typing import Any, Final

from mindspeed import registry
from mindspeed.engine.inspection.cli_arguments import Argument, Surface
from mindspeed.engine.planning.plan import ActivationPlan
from mindspeed.engine.resolution.environment import Environment
from mindspeed.engine.resolution.planned_feature import PlanNote
from mindspeed.engine.resolution.request import Layer
from mindspeed.megatron_lm.argument_layers import removable_flags
from mindspeed.megatron_lm.argument_words import ArgumentWords
from mindspeed.megatron_lm.dialects import dialects, translations
from mindspeed.megatron_lm.given_arguments import KINDS, given_arguments, surface_or_nearest
from mindspeed.megatron_lm.raw_data import split_data_options
from mindspeed.megatron_lm.training_plan import plan_training
from mindspeed.megatron_lm.training_request import ScriptRequest, split_own_flags
from mindspeed.plugins.discovery import Catalog
from mindspeed.problems import Fix, GivenValue, Problem, ResolutionError, on_command_line
from mindspeed.workbench.lint.launched_command import COMMAND_LINE, LaunchedCommand

_HIDING: Final = ("MS111", "MS113", "MS301")


def plan_command(command: LaunchedCommand, environment: Environment) -> ActivationPlan:
    """The plan of a training command, see `read_and_plan_command`."""
    return read_and_plan_command(command, environment)[1]


def read_and_plan_command(
    command: LaunchedCommand,
    environment: Environment,
    below: Sequence[Layer] = (),
    also: Sequence[Layer] = (),
    registered: Collection[str] = (),
) -> tuple[ScriptRequest, ActivationPlan]:
    """Read a training command and plan it for an environment, whose ``world_size`` overrides that of the launcher.

    ``below`` and ``also`` are layers below and beside the command, ``registered`` the options of its script. Raises
    ResolutionError with every problem, each with the line of its option where the command has lines.
    """
    known = surface_or_nearest(environment.megatron)
    catalog = registry.catalog_for(())
    own_words, notes = _filled([word.text for word in command.arguments], known, command)
    own_options = [option for option in registered if option not in known.by_option]
    words, problems = _parsed(_without(own_words, own_options), known, catalog)
    refusals = (dialect.refusal_of(command.program) for dialect in dialects())
    problems[:0] = [problem for problem in refusals if problem is not None]
    size = environment.world_size or command.world_size or smallest_world(words, known)
    planned, in_words = None, on_command_line
    for _ in range(2):  # a flag without an equivalent hides what is wrong with the rest
        try:
            planned = plan_training(words, {}, replace(environment, world_size=size), below, also)
        except ResolutionError as error:
            problems, in_words = [*problems, *error.problems], error.words
            refused = {option for problem in error.problems if problem.code in _HIDING for option in _given(problem)}
            words, before = _without(words, refused), words
            if words == before:
                break
        else:
            break
    if planned is None or problems:
        unique = list(dict.fromkeys(located(problem, command, known, catalog) for problem in problems))
        raise ResolutionError(unique, in_words)
    request, plan = planned
    return request, replace(plan, rows=(*plan.rows, *notes, *_notes(command, environment, size)))


def smallest_world(words: Sequence[str], known: Surface) -> int:
    """The least number of processes that the parallel sizes of a command need."""
    given = given_arguments(words, known)

    def size(dest: str) -> int:
        value = given[dest].value if dest in given else None
        return value if isinstance(value, int) and value > 0 else 1

    tensor = size("tensor_model_parallel_size")
    expert_tensor = size("expert_tensor_parallel_size") if "expert_tensor_parallel_size" in given else tensor
    dense = tensor * size("context_parallel_size")
    experts = size("expert_model_parallel_size")
    return size("pipeline_model_parallel_size") * (lcm(dense, experts * expert_tensor) if experts > 1 else dense)


def _notes(command: LaunchedCommand, environment: Environment, size: int) -> Iterator[PlanNote]:
    if environment.world_size is None and command.world_size is None:
        text = f"the number of processes is not given; planned for {size}, the minimum for these sizes (--world-size N)"
        yield PlanNote("warning", "launcher", text)
    if command.unset:
        names = ", ".join(name if name.isidentifier() else f"${name}" for name in command.unset)
        text = f"variables that the script does not set are treated as empty: {names}; set them by: {_setting(command)}"
        yield PlanNote("warning", "launcher", text)
    if command.others:
        text = f"further training commands are not planned: {', '.join(command.others)}"
        yield PlanNote("warning", "launcher", text)


def _setting(command: LaunchedCommand) -> str:
    """The command that checks a script with the variables and arguments that it does not set itself."""
    words = [*(f"{name}=VALUE" for name in command.unset if name.isidentifier()), "mindspeed check"]
    count = max(map(int, filter(str.isdecimal, command.unset)), default=0)
    return " ".join([*words, *(["-- bash"] if count else []), shlex.quote(command.script), *["ARG"] * count])


def left_open(command: LaunchedCommand, known: Surface) -> list[str]:
    """The options with a value that only a run of the script would know: from a command, or from a variable that nothing sets.

    Texts are none of them, because any text can stand in their place.
    """
    found = []
    for option, values in _options([word.text for word in command.arguments]):
        argument = known.by_option.get(option)
        if argument is not None and argument.takes_value and not _is_text(argument):
            is_missing = bool(command.unset) and not values and argument.nargs not in ("*", "?")
            if is_missing or any(value.startswith("$(") for value in values):
                found.append(option)
    return found


def _is_text(argument: Argument) -> bool:
    return argument.takes_value and argument.nargs is None and argument.type in (None, "str") and not argument.choices


def _filled(words: Sequence[str], known: Surface, command: LaunchedCommand) -> tuple[list[str], list[PlanNote]]:
    """The words with one for each path that a script leaves to be filled in: several words, or an empty variable.

    An option whose other value only a run of the script would know is left out, and noted.
    """
    filled: list[str] = []
    notes = []
    unknown = left_open(command, known)
    for option, values in _options(words):
        argument = known.by_option.get(option)
        is_text = _is_text(argument) if argument is not None else _is_foreign_text(option)
        if option in unknown:
            text = f"the value of {option}{_place(option, command)}, which is known only when the script runs"
            notes.append(PlanNote("not-checked", "launcher", text))
            continue
        equals = [f"{option}={values[0]}"] if values and f"{option}={values[0]}" in words else None
        if equals is None and is_text and (len(values) > 1 or (not values and command.unset)):
            text = f"{option} is {' '.join(values) or 'empty'}{_place(option, command)}: give it a value, or quote it"
            notes.append(PlanNote("warning", "launcher", text))
            values = [" ".join(values) or "EMPTY"]
        filled += (equals + values[1:]) if equals is not None else [*([option] if option else []), *values]
    return filled, notes


def _place(option: str, command: LaunchedCommand) -> str:
    """The place of an option of a script in brackets: its line, behind its file where that is another one."""
    file, line = command.place_of(option) or ("", 0)
    return (f" (line {line})" if file == command.source else f" ({file}:{line})") if line else ""


def _is_foreign_text(option: str) -> bool:
    return any(dialect.takes_text(option) for dialect in dialects())


def _parsed(words: Sequence[str], known: Surface, catalog: Catalog) -> tuple[list[str], list[Problem]]:
    """The words without options that Megatron's parser would refuse, and a problem for each of those."""
    _, theirs = split_own_flags(words, [])
    translated = translations(theirs, frozenset(known.by_option), catalog)
    _, rest = split_data_options(translated[-1][1].rest if translated else theirs, [])
    problems, refused = [], set()
    for option, values in _options(rest):
        if (problem := _refusal(option, values, known)) is not None:
            problems.append(problem)
            refused.add(option)
    return _without(words, refused), list(dict.fromkeys(problems))


def _without(words: Sequence[str], options: Collection[str]) -> list[str]:
    """The words without these options and their values."""
    made = ArgumentWords(list(words))
    for option in filter(None, options):
        made.take(option, "+")
    return made.words


def without_options(command: LaunchedCommand, options: Collection[str]) -> LaunchedCommand:
    """The command without these options and their values."""
    kept, skipping = [], False
    for word in command.arguments:
        if word.text.startswith("--"):
            skipping = word.text.partition("=")[0] in options
        kept += [] if skipping else [word]
    return replace(command, arguments=tuple(kept))


def _options(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Options with the words behind each; words before the first are a problem of the name ``""``."""
    option, values = "", list[str]()
    for word in words:
        if word.startswith("--") and len(word) > 2:
            yield option, values
            option, equals, value = word.partition("=")
            values = [value] if equals else []
        else:
            values.append(word)
    yield option, values


def _refusal(option: str, values: list[str], known: Surface) -> Problem | None:
    """Return what Megatron's parser would say of an option and the words behind it."""
    if not option:
        text, fix = f"the value {shlex.join(values)} has no option before it", Fix.advise("put each value after its option")
        return Problem("MS114", text, where=COMMAND_LINE, fix=fix) if values else None
    fact = GivenValue(option, " ".join(values), COMMAND_LINE, option)
    argument = known.by_option.get(option)
    if argument is None:
        near = get_close_matches(option, known.by_option, 2, 0.8)
        text = f"{option} is not an option of Megatron-LM {known.version} or mindspeed"
        switched_off = known.by_dest.get(option.removeprefix("--").replace("-", "_"), ())
        if any(other.default is True and not other.takes_value for other in switched_off):
            fix = Fix.advise(f"remove {option}: it is on by default")
        else:
            fix = Fix.advise(f"use {' or '.join(near)}" if near else f"remove {option}, unless the script registers it")
        return Problem("MS114", text, where=COMMAND_LINE, fix=fix, facts=(fact,))
    if wrong := _wrong_value(argument, values):
        return Problem("MS114", f"{option} {wrong[0]}", where=COMMAND_LINE, fix=Fix.advise(wrong[1]), facts=(fact,))
    return None


def _wrong_value(argument: Argument, values: list[str]) -> tuple[str, str] | None:
    option = argument.options[0]
    if not argument.takes_value:
        return (f"takes no value, but is followed by {shlex.join(values)}", f"remove {shlex.join(values)}") if values else None
    count = argument.nargs if isinstance(argument.nargs, int) else None
    if not values and argument.nargs not in ("*", "?"):
        return "has no value", f"give {option} a value"
    if argument.nargs in (None, 1) and len(values) > 1:
        return f"takes one value, but {shlex.join(values)} are given", f"give {option} one value"
    if count is not None and len(values) != count:
        return f"takes {count} values, but {shlex.join(values)} are given", f"give {option} {count} values"
    for value in values:
        if argument.type in KINDS and not _converts(KINDS[argument.type], value):
            kind = "a whole number" if argument.type == "int" else "a number"
            return f"is {value!r}, not {kind}", f"give {option} {kind}"
        if argument.choices is not None and value not in map(str, argument.choices):
            return f"is {value!r}, which Megatron-LM does not accept", f"use one of {', '.join(map(str, argument.choices))}"
    return None


def _converts(kind: Any, text: str) -> bool:
    try:
        kind(text)
    except ValueError:
        return False
    return True


def located(problem: Problem, command: LaunchedCommand, known: Surface, catalog: Catalog) -> Problem:
    """The problem with file and line of the option that it is about."""
    options = [*_given(problem), *_flags_of(problem, known, catalog)]
    place = next((place for option in options if (place := command.place_of(option)) is not None), None)
    if place is None:
        return problem
    file, line = place
    beside = f" ({problem.where})" if problem.where not in ("", COMMAND_LINE) else ""
    return replace(problem, where=f"{file}:{line}{beside}")


def _given(problem: Problem) -> list[str]:
    """The options on the command line that give the values at fault."""
    return [fact.option for fact in problem.facts if fact.option]


def _flags_of(problem: Problem, known: Surface, catalog: Catalog) -> Iterator[str]:
    """Options that switch on the features of a problem, or give their settings."""
    for name in problem.features:
        for dialect in dialects():
            yield from dialect.flags_of(name)
        for feature, flag in removable_flags(catalog):
            if feature == name:
                yield from (option for argument in known.by_dest.get(flag.dest, ()) for option in argument.options)
