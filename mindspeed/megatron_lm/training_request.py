"""Read a Megatron-LM command line: the flags of mindspeed, and the features and sizes that Megatron's arguments give.

Our flags are taken out of the command line, Megatron's stay in it, so that each is read by one parser. Light: Megatron's
arguments are known from the recorded surface, nothing of Megatron is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from mindspeed.engine.inspection.cli_arguments import Surface
from mindspeed.engine.resolution.planned_feature import PlanNote
from mindspeed.engine.resolution.request import JobFile, Layer, layer_from_environment, parse_assignments, split_names
from mindspeed.megatron.pad_token_check import warning_of_arguments
from mindspeed.megatron_lm.argument_layers import disagreements, layers_of, removable_flags, requested_holder
from mindspeed.megatron_lm.argument_words import ArgumentWords
from mindspeed.megatron_lm.dialects import GuardedDialect, Translation, broken_dialects, translations
from mindspeed.megatron_lm.given_arguments import (
    Given,
    abbreviations,
    given_arguments,
    surface_or_nearest,
    unknown_options,
    without_arguments,
)
from mindspeed.megatron_lm.hugging_face_load import read_hugging_face_load
from mindspeed.megatron_lm.raw_data import RawData, read_raw_data, split_data_options
from mindspeed.plugins.discovery import Catalog
from mindspeed.problems import CollectedProblems, Fix, Problem, ResolutionError

COMMAND_LINE: Final = "command line"
OWN_FLAGS: Final = {
    "--features": "Names of features, separated by commas",
    "--set": "Value of a setting, as feature.field=value",
    "--without": "Names of features to remove, separated by commas",
    "--mindspeed-config": "a job file",
    "--optimization-level": "0, 1 or 2",
    "--strict": "",
    "--only": "",
}
"""Our flags on a Megatron-LM command line, with what must follow each; an empty text is a switch."""


_OF_PATTERN: Final = ("num_layers", "mtp_num_layers")
"""Arguments that Megatron-LM from 0.17 on replaces, with a warning, by what the pattern of a hybrid model says."""


@dataclass(frozen=True, slots=True)
class ScriptRequest:
    """A Megatron-LM command line, read.

    ``defaults`` are below every other layer, ``layers`` (job file, environment, Megatron's flags) go from low to high, and
    ``command_line``, our flags, is above them. ``rest`` is the command line without our flags, ``given`` Megatron's
    arguments that stand on it by dest, ``notes`` what the reader of the plan must know, ``raw`` the text among its data that
    `with_prepared_data` tokenizes, ``loads_hugging_face`` whether ``--load`` names a model of Hugging Face.
    """

    defaults: tuple[Layer, ...]
    layers: tuple[Layer, ...]
    command_line: Layer
    rest: tuple[str, ...]
    given: Mapping[str, Given] = field(default_factory=dict)
    notes: tuple[PlanNote, ...] = ()
    raw: tuple[RawData, ...] = ()
    loads_hugging_face: bool = False


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
    problems = CollectedProblems()
    own, rest = split_own_flags(arguments, problems)
    job = problems.collect(lambda: _job_file(own))
    environment = problems.collect(lambda: layer_from_environment(environ)) or Layer("environment variable")
    command_line = problems.collect(lambda: _command_line(own)) or Layer(COMMAND_LINE)
    known = surface_or_nearest(version)
    strict = bool(command_line.strict or (job is not None and job.layer.strict) or any(layer.strict for layer in also))
    translated = _translated(rest, known, catalog_for)
    rest = list(translated[-1][1].rest) if translated else rest
    for _, translation in translated:
        problems += [*translation.problems, *(translation.left_out if strict else ())]
    options, rest = split_data_options(rest, problems)
    given = given_arguments(rest, known)
    raw, data_notes = read_raw_data(given, options, version, problems)
    weights = read_hugging_face_load(given, problems)
    job_layers = [job.layer] if job is not None else []
    old_layers = [translation.layer for _, translation in translated]
    ours = [*old_layers, *also, command_line]
    others = [*below, environment, *job_layers, *ours]
    catalog = catalog_for(name for layer in others for name in layer.features)
    old_notes = _notes(translated)
    for at, (_, translation) in enumerate(translated):
        before = old_layers[at]
        old_layers[at], added = _with_fallbacks(before, translation.fallbacks, catalog, others)
        others = [old_layers[at] if layer is before else layer for layer in others]
        old_notes += added
    given, rest, removed = without_arguments(given, rest, known, removable_flags(catalog), others)
    read = layers_of(without_overridden(given, known), known, catalog, others, world_size)
    theirs, notes = list(read.given.values()), read.notes
    problems += [*read.problems, *disagreements(theirs, ours, catalog)]
    if problems:
        raise ResolutionError([*(problem for layer in job_layers for problem in layer.problems), *problems])
    if job is not None and job.train:
        section = "the section train applies only to mindspeed pretrain; Megatron-LM has flags for these values"
        notes.append(PlanNote("note", "job file", section))
    values = {dest: argument.value for dest, argument in given.items()}
    if text := warning_of_arguments(values, version):
        notes.append(PlanNote("warning", "megatron-lm", text))
    advices = (dialect.advice(values, version) for dialect, _ in translated)
    old_notes += [PlanNote("note", "HybridModel", text) for text in advices if text]
    notes = [*notes, *removed, *abbreviations(rest, known), *old_notes, *data_notes, *weights]
    lowest, layers = (read.defaults, *old_layers), (*job_layers, environment, *theirs)
    return ScriptRequest(lowest, layers, command_line, tuple(rest), given, tuple(notes), raw, bool(weights))


def without_overridden(given: Mapping[str, Given], known: Surface) -> dict[str, Given]:
    """The arguments without those that a Megatron takes from the pattern of a hybrid model."""
    overrides = any(argument.options for argument in known.by_dest.get("hybrid_layer_pattern", ()))
    has_pattern = not given.keys().isdisjoint(("hybrid_layer_pattern", "hybrid_override_pattern"))
    return {dest: one for dest, one in given.items() if not (overrides and has_pattern and dest in _OF_PATTERN)}


def split_own_flags(arguments: Sequence[str], problems: list[Problem]) -> tuple[dict[str, list[str]], list[str]]:
    """Our flags with their values, and everything else in its order. Adds MS301 for a flag without its value."""
    own: dict[str, list[str]] = {}
    words = ArgumentWords(list(arguments))
    for flag, needed in OWN_FLAGS.items():
        for values in words.replace_all(flag, 1 if needed else 0):
            if needed and not values:
                problems.append(
                    Problem("MS301", f"{flag} needs a value: {needed}", where=COMMAND_LINE, fix=Fix.drop_option(flag))
                )
            else:
                own.setdefault(flag, []).append("".join(values))
    return own, words.words


def _job_file(own: Mapping[str, list[str]]) -> JobFile | None:
    files = own.get("--mindspeed-config", [])
    if len(files) > 1:
        text = f"--mindspeed-config is given {len(files)} times: {', '.join(files)}"
        raise ResolutionError([Problem("MS301", text, where=COMMAND_LINE, fix=Fix.advise("put all settings into one file"))])
    if not files:
        return None
    from mindspeed.engine.resolution.job_file import load_job_file

    return load_job_file(files[0])


def _command_line(own: Mapping[str, list[str]]) -> Layer:
    problems = CollectedProblems()
    settings = problems.collect(lambda: parse_assignments(own.get("--set", []), "--set")) or {}
    for level in own.get("--optimization-level", []):
        if level not in ("0", "1", "2"):
            text, fix = f"optimization level {level} is not 0, 1 or 2", Fix.give_option("--optimization-level", 2)
            problems.append(Problem("MS301", text, where=COMMAND_LINE, fix=fix))
    if problems:
        raise ResolutionError(problems)
    return Layer(
        COMMAND_LINE,
        features=split_names(",".join(own.get("--features", []))),
        settings=settings,
        without=split_names(",".join(own.get("--without", []))),
        level=int(own["--optimization-level"][-1]) if "--optimization-level" in own else None,
        strict=True if "--strict" in own else None,
        only=True if "--only" in own else None,
    )


def _translated(
    arguments: list[str], known: Surface, catalog_for: Callable[[Iterable[str]], Catalog]
) -> list[tuple[GuardedDialect, Translation]]:
    """Translate what Megatron's parser does not take; empty if it takes everything."""
    given = given_arguments(arguments, known)
    unknown_values = any(_is_unknown(known, dest, argument.value) for dest, argument in given.items())
    if not unknown_values and not unknown_options(arguments, known):
        return []
    return translations(arguments, frozenset(known.by_option), catalog_for(()))


def _notes(translated: Iterable[tuple[GuardedDialect, Translation]]) -> list[PlanNote]:
    notes = []
    for dialect, translation in translated:
        notes += [PlanNote("note", dialect.name, text) for text in translation.notes]
        notes += [PlanNote("warning", dialect.name, problem.message) for problem in translation.left_out]
    return notes + [PlanNote("warning", "dialects", f"{one.code} {one.message}; {one.fix_text}") for one in broken_dialects()]


def _with_fallbacks(
    old: Layer, fallbacks: Sequence[tuple[str, str]], catalog: Catalog, others: Sequence[Layer]
) -> tuple[Layer, list[PlanNote]]:
    """The layer of a dialect with the features that its program enables by itself, where no other holds their slots."""
    notes = []
    for name, reason in fallbacks:
        if name in catalog.specs and not requested_holder(set(catalog.specs[name].slots), catalog, others):
            old = replace(old, features=(*old.features, name))
            notes.append(PlanNote("note", name, reason))
    return old, notes


def _is_unknown(known: Surface, dest: str, value: Any) -> bool:
    choices = known.by_dest[dest][0].choices
    values = value if isinstance(value, list) else [value]
    return choices is not None and any(isinstance(one, str) and one not in choices for one in values)
