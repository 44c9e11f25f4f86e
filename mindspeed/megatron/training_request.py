"""Read a Megatron-LM command line: the flags of mindspeed, and the features and sizes that Megatron's arguments give.

Our flags are taken out of the command line, Megatron's stay in it, so that each is read by one parser. Light: Megatron's
arguments are known from the recorded surface, nothing of Megatron is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

from mindspeed.inspection.cli_arguments import Surface
from mindspeed.megatron.argument_layers import disagreements, layers_of, removable_flags
from mindspeed.megatron.given_arguments import (
    Given,
    abbreviations,
    given_arguments,
    surface_or_nearest,
    unknown_options,
    without_arguments,
)
from mindspeed.megatron.pad_token_check import warning_of_arguments
from mindspeed.plugins.discovery import Catalog
from mindspeed.plugins.problems import MindSpeedError, Problem, ResolutionError
from mindspeed.resolution.planned_feature import PlanNote
from mindspeed.resolution.request import JobFile, Layer, layer_from_environment, load_job_file, parse_assignments, split_names

COMMAND_LINE: Final = "command line"
OWN_FLAGS: Final = {
    "--features": "names of features, separated by commas",
    "--set": "a setting, as feature.field=value",
    "--without": "names of features to leave out, separated by commas",
    "--mindspeed-config": "a job file",
    "--optimization-level": "0, 1 or 2",
    "--strict": "",
}
"""Our flags on a Megatron-LM command line, with what must follow each; an empty text is a switch."""

OLD_FLAGS: Final = "mindspeed.legacy.flags"
"""The module that knows flags of the old MindSpeed; looked for only where a command line has something that Megatron lacks."""


@dataclass(frozen=True, slots=True)
class ScriptRequest:
    """A Megatron-LM command line, read.

    ``defaults`` are below every other layer, ``layers`` (job file, environment, Megatron's flags) go from low to high, and
    ``command_line``, our flags, is above them. ``rest`` is the command line without our flags, ``given`` Megatron's
    arguments that stand on it by dest, ``notes`` what the reader of the plan must know.
    """

    defaults: tuple[Layer, ...]
    layers: tuple[Layer, ...]
    command_line: Layer
    rest: tuple[str, ...]
    given: Mapping[str, Given] = field(default_factory=dict)
    notes: tuple[PlanNote, ...] = ()


def read_command_line(
    arguments: Sequence[str],
    environ: Mapping[str, str],
    version: str | None,
    catalog_for: Callable[[Iterable[str]], Catalog],
    also: Sequence[Layer] = (),
    world_size: int = 1,
    below: Sequence[Layer] = (),
) -> ScriptRequest:
    """Read the arguments of a Megatron-LM script, for the Megatron of this ``version``.

    ``catalog_for`` gives the catalog with these features of other distributions loaded. ``also`` are layers of the same
    command line that were read elsewhere, as the options of ``mindspeed run``, and ``below`` its lower ones. Raises
    ResolutionError with every problem: flags of ours that cannot be read, and values that ours and Megatron's give differently.
    """
    problems: list[Problem] = []
    own, rest = split_own_flags(arguments, problems)
    job = _job_file(own, problems)
    environment = _environment(environ, problems)
    command_line = _command_line(own, problems)
    known = surface_or_nearest(version)
    old, rest, old_notes = _old_flags(rest, given_arguments(rest, known), known, catalog_for, problems)
    given = given_arguments(rest, known)
    ours = [*([old] if old is not None else []), *also, command_line]
    others = [*below, environment, *([job.layer] if job else []), *ours]
    catalog = catalog_for(name for layer in others for name in layer.features)
    given, rest, removed = without_arguments(given, rest, known, removable_flags(catalog), others)
    read = layers_of(given, known, catalog, others, world_size)
    theirs, notes = list(read.given.values()), read.notes
    problems += [*read.problems, *disagreements(theirs, ours, catalog)]
    if problems:
        raise ResolutionError(problems)
    if job is not None and job.train:
        notes.append(
            PlanNote("note", "job file", "its section train is for mindspeed pretrain, Megatron-LM has flags of its own")
        )
    if text := warning_of_arguments({dest: argument.value for dest, argument in given.items()}, version):
        notes.append(PlanNote("warning", "megatron-lm", text))
    below = (read.defaults, *([old] if old is not None else []))
    layers = (*([job.layer] if job is not None else []), environment, *theirs)
    notes = [*notes, *removed, *abbreviations(rest, known), *old_notes]
    return ScriptRequest(below, layers, command_line, tuple(rest), given, tuple(notes))


def split_own_flags(arguments: Sequence[str], problems: list[Problem]) -> tuple[dict[str, list[str]], list[str]]:
    """Our flags with their values, and everything else in its order. Adds MS301 for a flag without its value."""
    own: dict[str, list[str]] = {}
    rest, words = [], iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        if name not in OWN_FLAGS:
            rest.append(word)
        elif not OWN_FLAGS[name]:
            own.setdefault(name, []).append(value)
        else:
            following = value if equals else next(words, None)
            if following is None or (not equals and following.startswith("--")):
                problems.append(Problem("MS301", f"{name} needs {OWN_FLAGS[name]}", where=COMMAND_LINE))
                rest += [following] if following is not None else []
            else:
                own.setdefault(name, []).append(following)
    return own, rest


def _job_file(own: Mapping[str, list[str]], problems: list[Problem]) -> JobFile | None:
    files = own.get("--mindspeed-config", [])
    if len(files) > 1:
        text = f"--mindspeed-config is given {len(files)} times: {', '.join(files)}"
        problems.append(Problem("MS301", text, where=COMMAND_LINE, fix="put everything into one file"))
        return None
    try:
        return load_job_file(files[0]) if files else None
    except MindSpeedError as error:
        problems.extend(error.problems)
        return None


def _environment(environ: Mapping[str, str], problems: list[Problem]) -> Layer:
    try:
        return layer_from_environment(environ)
    except MindSpeedError as error:
        problems.extend(error.problems)
        return Layer("environment variable")


def _command_line(own: Mapping[str, list[str]], problems: list[Problem]) -> Layer:
    settings: dict[str, dict[str, Any]] = {}
    try:
        settings = parse_assignments(own.get("--set", []), "--set")
    except MindSpeedError as error:
        problems.extend(error.problems)
    level = None
    for text in own.get("--optimization-level", []):
        if text in ("0", "1", "2"):
            level = int(text)
        else:
            problem = Problem("MS301", f"optimization level {text} is not 0, 1 or 2", where=COMMAND_LINE)
            problems.append(replace(problem, fix="--optimization-level 2"))
    return Layer(
        COMMAND_LINE,
        features=split_names(",".join(own.get("--features", []))),
        settings=settings,
        without=split_names(",".join(own.get("--without", []))),
        level=level,
        strict=True if "--strict" in own else None,
    )


def _old_flags(
    arguments: list[str],
    given: Mapping[str, Given],
    known: Surface,
    catalog_for: Callable[[Iterable[str]], Catalog],
    problems: list[Problem],
) -> tuple[Layer | None, list[str], list[PlanNote]]:
    """Ask `mindspeed.legacy.flags`, where it is installed, for what Megatron's parser does not take: layer, rest, notes."""
    strange = any(_is_strange(known, dest, argument.value) for dest, argument in given.items())
    if not (strange or unknown_options(arguments, known)) or not _is_there(OLD_FLAGS):
        return None, arguments, []
    old = import_module(OLD_FLAGS).read_old_flags(arguments, frozenset(known.by_option), catalog_for(()))
    problems += old.problems
    return old.layer, list(old.rest), [PlanNote("note", "old flags", text) for text in old.notes]


def _is_strange(known: Surface, dest: str, value: Any) -> bool:
    choices = known.by_dest[dest][0].choices
    return choices is not None and isinstance(value, str) and value not in choices


def _is_there(module: str) -> bool:
    package = module.rpartition(".")[0]
    return find_spec(package) is not None and find_spec(module) is not None
